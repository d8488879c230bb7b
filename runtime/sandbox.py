"""Templates from elsewhere: no way out of the sandbox, and an end."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import loopcontrols
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgevlm.errors import UserError

STEPS = 1_000_000  # lines of Python that a rendering may take; the chat templates of published models take hundreds
LONGEST = 1_000_000  # characters, items or bits that a product or a sum in a template may have


class _Bounded(CodeGenerator):
    """Jinja2's compiler, whose ``a ~ b`` asks the sandbox."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's, in which products and sums are bounded too, with what chat templates expect beside it."""

    intercepted_binops = frozenset({"+", "*", "**"})
    code_generator_class = _Bounded

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.globals["raise_exception"] = _raise

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See jinja2.sandbox.SandboxedEnvironment. Raises SecurityError for a result that is too large."""
        if operator == "**" and _bits(left) * abs(right) > LONGEST:
            raise jinja2.exceptions.SecurityError(f"a power of more than {LONGEST} bits")
        if operator == "*" and _items(left, right) > LONGEST:
            raise jinja2.exceptions.SecurityError(f"a product of more than {LONGEST} characters or items")
        if operator == "+" and _length(left) + _length(right) > LONGEST:
            raise jinja2.exceptions.SecurityError(f"a sum of more than {LONGEST} characters or items")
        return super().call_binop(context, operator, left, right)

    def joined(self, parts: tuple[object, ...]) -> str:
        """What ``a ~ b`` is. Raises SecurityError for a result that is too large."""
        if sum(map(_length, parts)) > LONGEST:
            raise jinja2.exceptions.SecurityError(f"a text of more than {LONGEST} characters")
        return str_join(parts)

    def compiled(self, source: str) -> jinja2.Template:
        """A template of ``source``. Raises UserError for one that is not valid."""
        try:
            return self.from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise _refusal(error) from None


def render(template: jinja2.Template, **values: object) -> str:
    """The text of ``template``. Raises UserError for one that fails, wants out of its sandbox, or takes more than STEPS."""
    left = STEPS

    def step(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise jinja2.TemplateError(f"it takes more than {STEPS} steps")
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        return template.render(**values)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise _refusal(error) from None
    except jinja2.TemplateError as error:
        raise _refusal(error) from None
    finally:
        sys.settrace(before)


def _refusal(error: BaseException) -> UserError:
    words = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"the chat template does not render ({words}); use the template that belongs to the model")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _bits(number: object) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _items(left: object, right: object) -> int:
    """Length of a product of a sequence and a whole number, 0 for another."""
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(count, int):
            return len(many) * count
    return 0
