"""Options of ``hdpcomm train`` from the command line, from a YAML file (by jsonargparse), and by default."""

from __future__ import annotations

import difflib
import re
from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hdpcomm.cli.train_options import TrainOptions, add_options, check_effects
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text

__all__ = ["read_config", "resolve_options"]

_LONGEST = 600  # characters of a message


def resolve_options(given: Mapping[str, Any], config: Path | str | None = None) -> TrainOptions:
    """Options of the command line, over those of ``config``, a file or its text, over the defaults.

    Raises: InvalidUsage, in one line, if the file cannot be read, has an unknown name or a wrong value, or if an option
        would change nothing beside the others.
    """
    found = {} if config is None else read_config(config)
    names = {each.name for each in fields(TrainOptions)}
    spelled = {name: value for name, value in given.items() if name in names}
    found |= spelled
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in found.items()}
    options = replace(TrainOptions(), **values)
    if "tokens_per_step" not in values:
        options = replace(options, tokens_per_step=max(options.tokens_per_step, options.context))
    check_effects(options, spelled)
    return options


def read_config(config: Path | str) -> dict[str, Any]:
    """The options that a file gives, or its text, checked as on the command line. Raises: InvalidUsage, in one line."""
    import yaml
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="hdpcomm train", exit_on_error=False)
    add_options(parser)
    where = f"--config {config}" if isinstance(config, Path) else "the options of the run"
    try:
        content = yaml.safe_load(read_text(config) if isinstance(config, Path) else config)
        if not isinstance(content, dict):
            raise TypeError("this file holds no options; give a line 'name: value' for each")
        several = {each.name for each in fields(TrainOptions) if isinstance(each.default, tuple)}
        given = {str(n): [v] if n in several and isinstance(v, str) else v for n, v in content.items()}
        found: dict[str, Any] = vars(parser.parse_object(given))
    except RecursionError:
        raise InvalidUsage(f"{where}: this YAML is nested too deeply; give one option a line") from None
    except OSError as error:
        raise InvalidUsage(f"{where}: {error.strerror}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise InvalidUsage(f"{where}: no YAML ({_one_line(error)[:_LONGEST]})") from None
    except (ArgumentError, ValueError, TypeError) as error:
        raise InvalidUsage(f"{where}: {_plain_message(_one_line(error), parser)}") from None
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _plain_message(message: str, parser: Any) -> str:
    message = re.sub(r'Parser key "([^"]+)":?', r"\1:", message)
    if wrong := re.search(r"Option '([^']+)' is not accepted", message):
        near = difflib.get_close_matches(wrong[1], [action.dest for action in parser._actions], n=1)
        message += f"; did you mean {near[0]}?" if near else "; hdpcomm train --help lists what there is"
    return message.strip()[:_LONGEST]
