"""The parts of tools/peer_bench."""
