"""Every block of docs/torch.md runs, one after the other."""
import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "torch.md"


def test_examples_of_the_torch_document():
    text = DOCUMENT.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 7 and all(language == "python" for language, _ in blocks)
    names = {}
    for _, block in blocks:
        first = text[: text.index(block)].count("\n")
        exec(compile("\n" * first + block, str(DOCUMENT), "exec"), names)
