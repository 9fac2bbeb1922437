"""YAML from others: no tag makes an object, no alias multiplies, nothing nests or counts beyond reason.

PyYAML's SafeLoader makes plain values only, but a text of a few hundred bytes may still merge (`<<`) or repeat (`*a`)
itself into billions of nodes, contain itself, or nest deeper than the interpreter's stack.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

MAX_NODES: Final = 200_000
"""With every alias counted as what it stands for."""


class AbsurdYAML(yaml.YAMLError):
    """Well-formed, and still nothing that anyone would write."""


def node_of(loader: yaml.SafeLoader) -> yaml.Node | None:
    """The loader's only document as nodes, None where it is empty. Raises yaml.YAMLError."""
    try:
        node: yaml.Node | None = loader.get_single_node()
        if node is not None:
            _count(node, {}, set())
    except RecursionError:
        raise AbsurdYAML("nested too deeply") from None
    except ValueError as error:
        raise AbsurdYAML(f"a value that cannot be: {error}"[:200]) from None
    return node


def safe_load(text: str) -> Any:
    """As `yaml.safe_load`, within bounds. Raises yaml.YAMLError and nothing else."""
    loader = yaml.SafeLoader(text)
    try:
        node = node_of(loader)
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise AbsurdYAML("nested too deeply") from None
    except (ValueError, OverflowError, TypeError) as error:
        # The 99th month of a date, a number of five thousand digits, a list as a key.
        raise AbsurdYAML(f"a value that cannot be: {error}"[:200]) from None
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int], inside: set[int]) -> int:
    if id(node) in known:
        return known[id(node)]
    if id(node) in inside:
        raise AbsurdYAML("nested too deeply: an alias that contains itself")
    if ":python/" in node.tag:
        raise AbsurdYAML("a tag that would make an object: could not determine a constructor")
    inside.add(id(node))
    size = 1
    if isinstance(node, yaml.MappingNode):
        size += sum(_count(key, known, inside) + _count(value, known, inside) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_count(item, known, inside) for item in node.value)
    if size > MAX_NODES:
        raise AbsurdYAML(f"more than {MAX_NODES} values: aliases that multiply")
    inside.discard(id(node))
    known[id(node)] = size
    return size
