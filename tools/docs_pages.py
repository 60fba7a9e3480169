"""A hook of mkdocs: makes the pages of the commands and of the Python interface from the parsers and the package.

Nothing is written into docs/. Every public name of ``hdpcomm`` and of its rooms has an entry, or the build fails.
"""

from __future__ import annotations

import argparse
import html
import importlib
import re
import sys
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP), str(TOP / "tools")]

import trainer_options  # noqa: E402 (mkdocs puts the path back after this)

# Room -> what it is for, in the order of the reference.
ROOMS = {
    "comm": "Joining ranks and communicating: subsets, collectives, exchanges.",
    "attention": "Attention of packs over any number of ranks.",
    "train": "The trainer, its shards and its losses.",
    "parallel": "HDP beside pipelines: the mesh, stages, their trainer.",
    "models": "Models in the form that the trainer calls.",
    "data": "Text, chats and token stores, with lengths before tokens.",
    "plan": "Who runs what: cost models, clusters, plans.",
    "measure": "What models cost on the ranks at hand.",
    "run": "Training runs that save, resume and export.",
    "offload": "Activations in pinned host memory.",
    "kernels": "Maths on buffers: losses, reductions.",
    "sim": "Planned steps on a simulated cluster.",
    "trace": "Pictures and traces of plans and steps.",
    "torch_backend": "hdpcomm as a backend of torch.distributed.",
    "perf": "What `hdpcomm perf` measures, for programs.",
    "testing": "Ranks as processes or threads, for tests of your own.",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    pages = {"reference/commands.md": commands_page(), "reference/trainer-options.md": options_page(), **api_pages()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_config(config: Any) -> Any:
    """Adds the generated pages to the navigation."""
    rooms = [{f"hdpcomm.{room}": f"reference/{room}.md"} for room in ROOMS]
    options = {"Options of others' trainers": "reference/trainer-options.md"}
    reference = [{"Commands": "reference/commands.md"}, options, {"hdpcomm": "reference/hdpcomm.md"}, *rooms]
    config["nav"].append({"Reference": reference})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Files beside docs/ are not on the site: a link to one there becomes its path."""
    folder = (TOP / "docs" / page.file.src_uri).parent

    def as_path(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if TOP / "docs" in path.parents or not path.exists():
            return match[0]
        place = path.relative_to(TOP).as_posix()
        return f"{match[1]}" if place in match[1] else f"{match[1]} (`{place}`)"

    return re.sub(r"(?<!!)\[([^]\[]+)\]\((\.\./[^)#\s]+)\)", as_path, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Docstrings mark names as Sphinx does, :meth:`wait`, which Markdown does not know."""
    return re.sub(r":(?:class|func|meth|mod|attr|data|exc):(?=<code>)", "", content).replace(
        "<code>~hdpcomm.", "<code>hdpcomm."
    )


def commands_page() -> str:
    """Each command's --help, as its parser prints it."""
    from hdpcomm.cli.main import build_parser

    parser = build_parser()
    parts = ["# Commands\n\nAs `hdpcomm COMMAND --help` prints them.\n", _usage("hdpcomm", parser)]
    parts += [_usage(f"hdpcomm {name}", each) for name, each in commands_of(parser)]
    return "\n".join(parts)


def options_page() -> str:
    """A page with the table of all options of transformers', TRL's and verl's trainers."""
    lines = [
        "# Options of others' trainers\n\nOf transformers and TRL with `HybridDataParallel` "
        "([Hugging Face models](../how-to/hugging-face.md)), and of [verl](../how-to/verl.md) with `strategy=hdpcomm`. "
        "What is refused ends in an error before training begins."
    ]
    for tables in (trainer_options.HUGGINGFACE, trainer_options.VERL):
        for kind in tables["works"]:
            lines.append(f"\n## {kind}\n\n| options | | |\n|---|---|---|")
            for verdict, table in tables.items():
                for names, reason in table.get(kind, {}).items():
                    lines.append(f"| {', '.join(f'`{name}`' for name in names.split())} | {verdict} | {reason} |")
    return "\n".join(lines)


def commands_of(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    """The commands below a parser, with their names from there on."""
    found: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found.append((name, command))
                found += [(f"{name} {below}", each) for below, each in commands_of(command)]
    return found


def _usage(title: str, parser: argparse.ArgumentParser) -> str:
    """As printed, with an anchor at each option: ``#hdpcomm-train--out``."""
    name = title.replace(" ", "-")
    text = re.sub(
        r"^  (?=(?:-\w[^-\n]*)?(--[\w-]+))", rf'  <a id="{name}\1"></a>', html.escape(parser.format_help()), flags=re.M
    )
    return f"## {title}\n\n<pre><code>{text}</code></pre>\n"


def api_pages() -> dict[str, str]:
    """A page a room: every name of its ``__all__``."""
    package = importlib.import_module("hdpcomm")
    own = [name for name in package.__all__ if not name.startswith("_") and name not in ROOMS]
    pages = {"reference/hdpcomm.md": _page("hdpcomm", "What `import hdpcomm as hdp` gives.", own)}
    for room, purpose in ROOMS.items():
        module = importlib.import_module(f"hdpcomm.{room}")
        pages[f"reference/{room}.md"] = _page(f"hdpcomm.{room}", purpose, list(module.__all__))
    return pages


def _page(module: str, purpose: str, names: list[str]) -> str:
    lines = [f"# {module}\n\n{purpose}\n"]
    for name in names:
        thing = getattr(importlib.import_module(module), name)
        ours = hasattr(thing, "__qualname__") and str(thing.__module__).startswith("hdpcomm.")
        target = f"{thing.__module__}.{thing.__qualname__}" if ours else f"{module}.{name}"
        lines.append(f"## {name}\n\n::: {target}\n    options:\n      heading_level: 3\n")
    return "\n".join(lines)
