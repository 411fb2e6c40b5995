#!/usr/bin/env python3
"""Words that the field has a name for do not come back (docs/glossary.md), and the kernels' folder keeps its rooms."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"bench", "checks", "cli", "cmake", "docs", "examples", "include", "python", "src", "tests", "tools"}
GLOSSARY, LAUNCH = "docs/glossary.md", "src/backend/cuda/runtime/launch.cuh"

# The field's word: the tree's former word. CHANGELOG.md has the names of old versions.
ONCE = {
    "CTA": r"\bthread[ -]blocks?\b",
    "SM": r"\bmultiprocessors?\b",
    "tensor cores": r"\bmatrix units?\b",
    "CTA of 2 or 4 warpgroups": r"\b\w*crews?\b",
    "tile scheduler": r"\bfind_share\b",
    "persistent CTA": r"\btokens in turn\b",
    "arrival counter with a time-out": r"\bpatience(_\w+)?\b|\b\w*MeetingBytes\b",
    "QK + softmax warpgroup, score kernel": r"(?<!\.)\bscorers?\b(?!\.)(?! = )",
    "PV warpgroup": r"\badders?\b",
    "symmetric ping-pong consumers": r"\bconsumers alike\b",
    "softmax": r"\bWeigher\b",
    "launch dependents, is_sm90": r"\blet_next_start\b|\boverlaps_launches\b",
    "validation": r"\bSecondLook\b|\bsecond look\b",
    "speculative": r"\b\w*guess(ed)?_record\b|\bguessed (record|share)\b",
    "ScoreMode": r"\bScoreSums\b|\bnear_sums\b|\bnear scores?\b|\bdefined (scores?|sums?)\b",
    "ambiguous candidates": r"\bkeys in doubt\b",
    "inverse_rope": r"\bturn_back\b",
    "dummy block, prefix block": r"\b\w*kept_block(_\w+)?\b|\b[Kk]ept blocks?\b|\bKeptBlocks?\b",
    "undo row": r"\bdisplaced(_\w+)?\b",
    "fold watermark": r"\bfrontiers?\b",
    "weights generation, prefix identity": r"\beras?\b|\bera_\b|\bChainName\b",
    "stale ids": r"\bunsure(_ids)?\b",
    "retiring": r"\b\w+_leaving\b",
}
# Rules of the kernels' folder. An empty asm text is a fence for the compiler, not an instruction.
ROOMS = [
    (r"\basm\b( volatile)?\(\s*(?!\"\")[\"\n]", lambda path: "/ptx/" not in path, "an instruction outside of ptx/"),
    (r"\bnamespace \{", lambda path: path.endswith((".h", ".cuh")), "an anonymous namespace in a header"),
    (r"nv_diag_suppress", lambda path: True, "a suppressed warning"),
    (r"\bcudaLaunchKernelEx|\bcudaFuncSetAttribute|<<<", lambda path: path != LAUNCH, f"a launch beside {LAUNCH}"),
]


def tracked():
    """Text files under version control, or all of the tree where there is none (an unpacked archive)."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    paths = listed.stdout.split("\0") if listed.returncode == 0 and listed.stdout else [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
        if path.relative_to(ROOT).parts[0] in FOLDERS or path.parent == ROOT]
    for name in paths:
        path = ROOT / name
        if name in ("", "CHANGELOG.md", str(Path(__file__).relative_to(ROOT))) or not path.is_file():
            continue
        if name.startswith("docs/figures/"):  # outputs of benchmarks
            continue
        try:
            yield name, path.read_text()
        except UnicodeDecodeError:
            continue


def problems_in(name, text):
    if name == GLOSSARY:  # its last column lists other projects' words
        text = re.sub(r"\|[^|\n]*\|$", "|", text, flags=re.M)
    line_of = lambda at: text.count("\n", 0, at) + 1
    for word, once in ONCE.items():
        for found in re.finditer(once, text):
            yield f"{name}:{line_of(found.start())}: '{found.group()}'; the glossary has: {word}"
    if name.startswith("src/backend/cuda/"):
        for pattern, applies, what in ROOMS:
            for found in re.finditer(pattern, text):
                if applies(name):
                    yield f"{name}:{line_of(found.start())}: {what}"


def main():
    files = list(tracked())
    problems = [problem for name, text in files for problem in problems_in(name, text)]
    if not files:
        problems.append(f"no files found below {ROOT}")
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
