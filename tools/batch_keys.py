"""Every key of a batch that the installed transformers knows, beside what the planning Trainer does with it.

    python tools/batch_keys.py                                 # what the table of hdpcomm lacks, and has too much
    python tools/batch_keys.py --write docs/how-to/hugging-face.md

The keys are the arguments of the forward passes of all causal language models, those that these hand on
(``TransformersKwargs``), and those of their losses and of the data collators. They are read from transformers' source
code: importing 189 models takes half a minute.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

BEGIN, END = "<!-- keys of a batch -->", "<!-- end of keys -->"


def keys_of_transformers() -> set[str]:
    """Names that a batch of the installed transformers may have."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    top = Path(transformers.__file__).parent
    found = set(re.findall(r'\w\["([a-z]\w+)"\]', (top / "data/data_collator.py").read_text()))
    found |= set(
        re.findall(r"^    ([a-z_]+): ", _classes([top / "utils/generic.py"])["TransformersKwargs"][1], re.MULTILINE)
    )
    losses = (top / "loss/loss_utils.py").read_text()
    for name in ("fixed_cross_entropy", "ForCausalLMLoss"):
        found |= _arguments(losses, f"def {name}")
    classes = _classes(top.glob("models/*/modeling_*.py"))
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for name in [names] if isinstance(names, str) else names:
            found |= _forward(name, classes)
    return found - {"self", "kwargs", "logits", "source", "target"}


def _classes(files: Iterable[Path]) -> dict[str, tuple[list[str], str]]:
    """(bases, source) of each class."""
    found = {}
    for file in files:
        for text in re.split(r"^(?=class )", file.read_text(), flags=re.MULTILINE)[1:]:
            if head := re.match(r"class (\w+)\(([^)]*)\)", text):
                found[head[1]] = (re.findall(r"\w+", head[2]), text)
    return found


def _forward(name: str, classes: Mapping[str, tuple[list[str], str]]) -> set[str]:
    """Arguments of the forward pass of a class, or of the first of its bases that has one."""
    bases, text = classes.get(name, ((), ""))
    return _arguments(text, "    def forward") or next(
        (args for base in bases if (args := _forward(base, classes))), set()
    )


def _arguments(text: str, head: str) -> set[str]:
    """Names of the arguments of a function; none if it is not there."""
    if (place := text.find(f"\n{head}(")) < 0:
        return set()
    function = ast.parse(textwrap.dedent(re.split(r":\n", text[place + 1 :], maxsplit=1)[0] + ": ...")).body[0]
    assert isinstance(function, ast.FunctionDef)
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def with_table(page: str) -> str:
    """The text of the page with the table of today between its marks."""
    from hdpcomm.integrations.huggingface_batch import CARRIED, REFUSED, WITHOUT_EFFECT

    rows = [((name,), "carried", text) for name, text in CARRIED.items()]
    rows += [(names, "no effect", text) for names, text in WITHOUT_EFFECT.items()]
    rows += [(names, "refused", text) for names, text in REFUSED.items()]
    lines = ["| keys of a batch | | |", "|---|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {kind} | {text} |" for names, kind, text in rows]
    before, _, rest = page.partition(BEGIN)
    return "\n".join((before + BEGIN, *lines, END + rest.partition(END)[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into this page")
    page = parser.parse_args().write
    if page is not None:
        page.write_text(with_table(page.read_text()))
    from hdpcomm.integrations.huggingface_batch import CARRIED, REFUSED, WITHOUT_EFFECT

    listed = {*CARRIED, *(name for names in (*WITHOUT_EFFECT, *REFUSED) for name in names)}
    known = keys_of_transformers()
    print(
        f"{len(known)} keys; not in the table: {sorted(known - listed)}; not in transformers: {sorted(listed - known)}"
    )
    return int(known != listed)


if __name__ == "__main__":
    sys.exit(main())
