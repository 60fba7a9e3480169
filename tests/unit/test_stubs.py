"""The stubs of the compiled modules name what the modules have, with the same parameters, and nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hdpcomm
from tests.harness.native import _testing

PACKAGE = Path(hdpcomm.__file__).parent
STUBS = {
    f"hdpcomm.{path.relative_to(PACKAGE).with_suffix('')}".replace("/", ".").removesuffix(".__init__"): path
    for path in (*(PACKAGE / "_core").glob("*.pyi"), PACKAGE / "testing/_native.pyi")
}
# A parameter: its name, and a mark for one that is given by position or by keyword only.
Signature = tuple[str, ...]
Names = dict[str, Signature | None]  # None: not a function
UNKNOWN: Signature = ("a plain C function without a text",)
BY_POSITION: Signature = ("any number of arguments by position",)


# --- what a stub says -------------------------------------------------------------------------------------------------


def declared_signature(node: ast.FunctionDef) -> Signature:
    arguments = node.args
    if arguments.vararg is not None:
        return BY_POSITION
    plain = [each.arg for each in arguments.args]
    if plain[:1] == ["self"]:
        del plain[0]
    by_position = [f"{i} /" for i, _ in enumerate(arguments.posonlyargs)]
    return (*by_position, *plain, *(f"* {each.arg}" for each in arguments.kwonlyargs))


def declared(body: list[ast.stmt], prefix: str = "") -> Names:
    found: Names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
            found[prefix + node.name] = None if is_property else declared_signature(node)
        elif isinstance(node, ast.ClassDef):
            found[prefix + node.name] = None
            found |= declared(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[prefix + node.target.id] = None
        elif isinstance(node, ast.Assign) and prefix:  # members of an enumeration; outside of classes an alias of types
            found |= {prefix + each.id: None for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.ImportFrom):  # `import x as x`: a submodule
            found |= {each.name: None for each in node.names if each.asname == each.name}
    return found


# --- what a module has ------------------------------------------------------------------------------------------------


def parameters(text: str) -> Iterator[str]:
    """The parts between the commas of a signature that pybind11 wrote, whatever the annotations hold."""
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            yield text[start:i]
            return
        if letter == "," and depth == 0:
            yield text[start:i]
            start = i + 1


def compiled_signature(name: str, documentation: str) -> Signature:
    first = next(line for line in documentation.splitlines() if line.startswith(f"{name}("))
    found: list[str] = []
    keyword = ""
    for part in parameters(first[len(name) + 1 :]):
        parameter = part.split(":")[0].strip()
        if parameter == "*":
            keyword = "* "
        elif parameter.startswith("arg") and parameter[3:].isdigit():  # it has no name
            found.append(f"{len(found)} /")
        elif parameter and parameter != "self":
            found.append(keyword + parameter)
    return tuple(found)


def is_public(name: str, value: Any) -> bool:
    made_in_core = name == "__init__" and "__init__(" in (value.__doc__ or "")
    return made_in_core or not name.startswith("_")


def compiled(module: types.ModuleType) -> Names:
    found: Names = {}
    for name, value in vars(module).items():
        if not is_public(name, value):
            continue
        found[name] = signature_of(name, value)
        if inspect.isclass(value):
            members = getattr(value, "__members__", None) or vars(value)  # of an enumeration; of another class
            for inner, member in members.items():
                if is_public(inner, member):
                    found[f"{name}.{inner}"] = signature_of(inner, member)
    return found


def signature_of(name: str, value: Any) -> Signature | None:
    function = value.__func__ if isinstance(value, staticmethod) else value
    if not inspect.isroutine(function) and not hasattr(function, "__func__"):
        return None
    return compiled_signature(name, function.__doc__) if function.__doc__ else UNKNOWN


# --- the comparison ---------------------------------------------------------------------------------------------------


def declared_in(name: str) -> Names:
    """The names of a stub. hdpcomm.testing._native gives methods to the core's Device; its stub has them in a class
    that is there for the types alone."""
    found = declared(ast.parse(STUBS[name].read_text()).body)
    if name == "hdpcomm.testing._native":
        return {each: signature for each, signature in found.items() if not each.startswith("TestedDevice")}
    if name == "hdpcomm._core.device":
        of_tests = declared(ast.parse(STUBS["hdpcomm.testing._native"].read_text()).body)
        tested = {each: signature for each, signature in of_tests.items() if each.startswith("TestedDevice.")}
        found |= {each.replace("TestedDevice", "Device"): signature for each, signature in tested.items()}
    return found


@pytest.mark.parametrize("name", STUBS)
def test_stub_and_module_say_the_same(name: str) -> None:
    in_stub = declared_in(name)
    in_module = compiled(importlib.import_module(name))
    assert sorted(in_stub) == sorted(in_module)
    for each, signature in in_module.items():
        told = in_stub[each]
        if told is BY_POSITION:
            assert signature is not None, each
            assert all(parameter.endswith(" /") for parameter in signature), f"{each} has parameters with names"
        elif signature is UNKNOWN:
            assert told is not None, each
            assert all(parameter.endswith(" /") for parameter in told), f"{each} takes arguments by position only"
        else:
            assert told == signature, each


def test_each_room_has_a_stub() -> None:
    rooms = {f"hdpcomm._core.{name}" for name, value in vars(hdpcomm._core).items() if inspect.ismodule(value)}
    assert rooms | {"hdpcomm._core", "hdpcomm.testing._native"} == set(STUBS)


@pytest.mark.parametrize(
    ("stub", "difference"),
    [
        ("def check(num_ranks: int, operations: list[int], seed: int, /, fault: int) -> str: ...", "kinds"),
        ("def check(ranks: int, operations: list[int], seed: int = 0, fault: int = 0) -> str: ...", "a name"),
        ("def check(num_ranks: int, operations: list[int], seed: int = 0) -> str: ...", "one less"),
        ("def check(num_ranks: int, operations: list[int], seed: int = 0, *, fault: int = 0) -> str: ...", "keyword"),
    ],
)
def test_differences_are_seen(stub: str, difference: str) -> None:
    right = "def check(num_ranks: int, operations: list[int], seed: int = 0, fault: int = 0) -> str: ..."
    function = compiled(_testing)["check"]
    assert declared(ast.parse(right).body)["check"] == function
    assert declared(ast.parse(stub).body)["check"] != function, difference
