"""The settings of a session, declared once for ``Session.open``, the command line, edgevlm.toml and HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from edgevlm.errors import UserError, nearest, reason

AUTO, ALL, CHANGED = "auto", "all", "changed"
TAU = 0.999
INTERVAL = 64
THRESHOLD = 6.0
LONGEST_QUESTION = 8192


class Metavar(NamedTuple):
    """The placeholder for a field's value in help texts, found in ``model_fields[name].metadata``."""

    text: str


@dataclass(frozen=True, slots=True)
class AppendChanged:
    """Settings of ``--append changed``.

    ``tau``: append a token if its feature's cosine similarity to the patch's reference is below this threshold, and below what
    camera noise can explain. ``refresh``: append a patch again after this many frames even if it is unchanged; 0 turns this
    off. ``present``: keep this many of the newest frames outside the memory; every question sees them whole.
    """

    tau: float = TAU
    refresh: int = 0
    present: int = 1

    def __str__(self) -> str:
        refresh, present = f",refresh={self.refresh}" if self.refresh else "", f",present={self.present}"
        return f"{CHANGED}:tau={self.tau:g}{refresh}{present if self.present > 1 else ''}"


@dataclass(frozen=True, slots=True)
class EncodeChanged:
    """Settings of ``--encode changed``.

    ``interval``: encode a whole frame every ``interval`` frames. With 0, the interval adapts, up to INTERVAL frames.
    ``threshold``: encode a patch if the most changed tenth of its pixels differs on average by at least this many levels, on
    a scale from 0 to 255. With threshold 0, every frame is encoded whole.
    """

    interval: int = 0
    threshold: float = THRESHOLD

    def __str__(self) -> str:
        return f"{CHANGED}:{f'interval={self.interval},' if self.interval else ''}threshold={self.threshold:g}"


def parse_append(text: str) -> tuple[str, float | None, int, int]:
    """Parse ``auto``, ``all`` or ``changed[:tau=T,refresh=N,present=N]``. Return the first word and the three settings.

    If the text does not set tau, ``tau`` is None, which means the model's value. Raises UserError for invalid text.
    """
    name, values = _split_changed("append", text, {"tau": TAU, "refresh": 0, "present": 1})
    tau, refresh, present = values.get("tau"), values.get("refresh", 0), values.get("present", 1)
    if tau is not None and not 0 < tau <= 1:
        raise UserError(f"append {text!r}: tau must be above 0 and at most 1")
    if refresh != int(refresh):
        raise UserError(f"append {text!r}: refresh must be an integer (frames)")
    if present != int(present) or present < 1:
        raise UserError(f"append {text!r}: present must be an integer (frames), 1 or more")
    return name, tau, int(refresh), int(present)


def parse_encode(text: str) -> tuple[str, EncodeChanged]:
    """Parse ``auto``, ``all`` or ``changed[:interval=K,threshold=T]``. Return that word, and the settings for ``changed``.

    Raises UserError for invalid text.
    """
    name, values = _split_changed("encode", text, {"interval": INTERVAL, "threshold": THRESHOLD})
    interval, threshold = values.get("interval", 0), values.get("threshold", THRESHOLD)
    if values.get("interval", 1) < 1 or interval != int(interval) or threshold > 255:
        raise UserError(f"encode {text!r}: interval must be an integer (frames), 1 or more, and threshold 0 to 255")
    return name, EncodeChanged(int(interval), threshold)


def _split_changed(option: str, text: str, usual: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    name, _, settings = text.partition(":")
    if name not in (AUTO, ALL, CHANGED):
        raise UserError(f"{option} {text!r}: {nearest(name, [AUTO, ALL, CHANGED])}")
    if name != CHANGED and settings:
        raise UserError(f"{option} {text!r}: {name} has no settings")
    values: dict[str, float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in usual or not re.fullmatch(r"\d{1,9}(?:\.\d{0,9})?|\.\d{1,9}", value):
            example = ",".join(f"{key}={value:g}" for key, value in usual.items())
            raise UserError(f"{option} {text!r}: give {CHANGED}:{example}")
        values[key] = float(value)
    return name, values


def parse_budget(text: str) -> int:
    """Parse ``512`` or ``6k`` (6,000) as a number of tokens. Raises UserError for invalid text."""
    return _number(text, "kK", f"budget {text!r}: give a number of tokens, like 512 or 6k")


def parse_bytes(text: str) -> int:
    """Parse ``8G`` (8,000,000,000) or ``256M`` as a number of bytes. Raises UserError for invalid text."""
    return _number(text, "kKmMgGtT", f"{text!r} is not a number of bytes, like 8G or 256M")


def _number(text: str, units: str, says: str) -> int:
    match = re.fullmatch(rf"(\d{{1,15}}(?:\.\d{{1,9}})?)([{units}]?)", text.strip())
    if not match:
        raise UserError(says)
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def check_policy(policy: Any) -> Any:
    """Return the policy. Raises UserError unless it is ``auto`` or the name, class or instance of a policy."""
    if isinstance(policy, str) and policy.startswith(f"{AUTO}:"):
        raise UserError(f"policy {policy}: auto has no settings; set them with the policy's own name")
    if policy != AUTO:
        from edgevlm.runtime.policies import as_policy  # as_policy imports numpy, which --help does not need

        as_policy(policy)
    return policy


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _by(parse: Any, *, keep: bool = False) -> AfterValidator:
    """Return a validator that parses a value. ``keep``: check the value, but leave it unparsed."""

    def check(value: Any) -> Any:
        try:
            parsed = parse(value) if keep or isinstance(value, str) else value
        except UserError as error:
            raise ValueError(str(error)) from None
        return value if keep else parsed

    return AfterValidator(check)


# field types, shared with the settings models of edgevlm.toml and of HTTP request bodies
Tokens = Annotated[Annotated[int, Field(strict=True)] | str, BeforeValidator(_integer), _by(parse_budget)]
Frames = Annotated[int, BeforeValidator(_integer), Field(strict=True, ge=1)]
Bytes = Annotated[Annotated[int, Field(strict=True, ge=0)] | str, BeforeValidator(_integer), _by(parse_bytes)]
Append = Annotated[str, _by(parse_append, keep=True)]
Encode = Annotated[str, _by(parse_encode, keep=True)]
AnyPolicy = Annotated[str | SkipJsonSchema[Any], _by(check_policy, keep=True)]


class SessionSettings(BaseModel):
    """The memory settings of ``Session.open``. Values are validated and parsed: ``budget="6k"`` becomes 6000.

    ``model_fields[name]`` holds a field's help (``description``), default and bounds and, in its metadata, a :class:`Metavar`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    policy: Annotated[AnyPolicy, Metavar("NAME[:K=V,..]")] = Field(
        AUTO, description="KV-cache eviction policy (see edgevlm policies)."
    )
    budget: Annotated[Tokens | None, Metavar("N|6k")] = Field(None, description="Keep this many vision tokens per layer.")
    chunk: Annotated[Frames, Metavar("N")] = Field(8, description="Encode this many frames at once.")
    reindexing: Annotated[Literal["lazy", "eager"], Metavar("lazy|eager")] = Field(
        "lazy", description="Re-index positions only when needed, or at every compression."
    )
    append: Annotated[Append, Metavar("auto|all|changed")] = Field(
        AUTO, description="Append all tokens of a frame, or only those that changed."
    )
    encode: Annotated[Encode, Metavar("auto|all|changed")] = Field(
        AUTO, description="Encode all patches of a frame, or only those that changed."
    )
    store_bytes: Annotated[Bytes | None, Metavar("8G")] = Field(
        None, description="Maximum size of the file to which a retrieval policy offloads KV blocks (8G)."
    )
    host_bytes: Annotated[Bytes | None, Metavar("256M")] = Field(
        None, description="Maximum host RAM for offloaded KV blocks (256M)."
    )
    max_question_tokens: Annotated[Frames, Metavar("N")] = Field(
        LONGEST_QUESTION, description="Accept questions of up to this many tokens, including their conversation."
    )

    @classmethod
    def checked(cls, settings: SessionSettings | None = None, **fields: Any) -> SessionSettings:
        """Return a copy of the settings with new values. Raises a one-line UserError that names the invalid field."""
        given = {} if settings is None else {name: getattr(settings, name) for name in SessionSettings.model_fields}
        if unknown := [name for name in fields if name not in cls.model_fields]:
            raise UserError(f"a session has no setting {unknown[0]!r}; {nearest(unknown[0], cls.model_fields)}")
        try:
            return cls(**{**given, **fields})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            field, why = str(first["loc"][0]), reason(first["msg"])
            raise UserError(why if field in why else f"{field}: {why}") from None
