"""The public interface: names with their parameters, and the options of the commands.

    python tools/public_names.py            prints what has gone since the release in tools/public_names.json
    python tools/public_names.py --write    writes the present ones there, as those of this version

tools/release.py refuses a release whose names are not written; a test wants every one that went in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP), str(TOP / "tools")]

import docs_pages  # noqa: E402

import hdpcomm  # noqa: E402
from hdpcomm.cli.main import build_parser  # noqa: E402

FILE = TOP / "tools" / "public_names.json"
Names = dict[str, Any]


def present() -> Names:
    """Public names and options of this tree."""
    modules = ["hdpcomm", *(f"hdpcomm.{room}" for room in docs_pages.ROOMS), "hdpcomm.integrations.huggingface"]
    names = {}
    for module in map(importlib.import_module, modules):
        for name in module.__all__:
            if name.startswith("_") or inspect.ismodule(thing := getattr(module, name)):
                continue
            names[f"{module.__name__}.{name}"] = _parameters(thing)
            for method in vars(thing) if inspect.isclass(thing) else ():
                if not method.startswith("_") and callable(getattr(thing, method)):
                    names[f"{module.__name__}.{name}.{method}"] = _parameters(getattr(thing, method))
    commands = {name: _options(parser) for name, parser in docs_pages.commands_of(build_parser())}
    return {"version": hdpcomm.__version__, "names": names, "commands": commands}


def gone(before: Names, now: Names) -> list[str]:
    """Names in ``before`` that ``now`` lacks: ``name``, ``name(parameter=)``, ``command`` and ``command --option``."""
    found = []
    for kind, form in (("names", "{}({}=)"), ("commands", "{} {}")):
        for name, parts in before[kind].items():
            if name not in now[kind]:
                found.append(name)
            else:
                found += [form.format(name, part) for part in parts if part not in now[kind][name]]
    return found


def _parameters(thing: Any) -> list[str]:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # of compiled code, or no function
        return []
    return [name for name in signature.parameters if not name.startswith("_") and name != "self"]


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(text for action in parser._actions for text in action.option_strings if text.startswith("--"))


def _text(names: Names) -> str:
    """JSON with a line for each name."""
    tables = [
        f"{json.dumps(kind)}: {{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in
        sorted(names[kind].items())) + "\n}" for kind in ("names", "commands")
    ]  # fmt: skip
    return f'{{"version": {json.dumps(names["version"])},\n' + ",\n".join(tables) + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write tools/public_names.json")
    if parser.parse_args().write:
        FILE.write_text(_text(present()))
        return
    before = json.loads(FILE.read_text())
    for each in gone(before, present()):
        print(f"gone since {before['version']}: {each}")


if __name__ == "__main__":
    main()
