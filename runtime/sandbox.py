"""Read models' chat templates and tokenizers in helper processes, with limits on memory and time.

The first template that is not in KNOWN starts the helper for templates, which takes 0.2 s and 22 MB.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError
from edgevlm.runtime.helper_process import Helper, HelperEnded

CPU_S = 2  # the most processor seconds for a template; published models' templates take a millisecond
WAIT_S = 60.0
MEMORY = 1 << 28  # the most bytes that the helper process may map after it starts
LONGEST = 1 << 20
TOKENIZER_S = 60  # the most processor seconds for a tokenizer; a tokenizer of 250,000 tokens takes 2 s
TOKENIZER_BYTES = 20
KNOWN = {  # SHA-256 of texts that need no helper: the demo's template and tokenizer, SmolVLM's default template
    "64908e476298d5017c8362d3c1cf7185abedc717720028d3e6a04691b9479b77",
    "11ead1817a1a6aee0fa8ae634dee8b58e99ebc088183b4a8f71efe28abd2f534",
    "dad132fe0567c3de66c99ad7a9db6ff407329f33a99f7d8ba3d0a140eb82c578",
}
helper = Helper(memory=MEMORY, cpu_s=CPU_S, wait_s=WAIT_S, imports=[__name__, "jinja2.sandbox", "jinja2.ext"])


def render(template: str, **values: Any) -> str:
    """Render a chat template. Raises UserError if the template fails, tries to leave its sandbox, or exceeds a limit."""
    try:
        if hashlib.sha256(template.encode()).hexdigest() in KNOWN:
            return render_here(template, values)
        return str(helper.call(f"{__name__}:render_here", template, values))
    except HelperEnded:
        why = f"exceeds the limit of {CPU_S} s or {MEMORY >> 20} MB"
    except UserError as error:
        why = str(error)
    raise UserError(f"the chat template cannot be rendered ({why}); use the model's own template")


def try_tokenizer(path: Path) -> None:
    """Check, in a helper process, that a tokenizer.json can be read. Raises UserError otherwise."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest in KNOWN:
        return
    memory = MEMORY + TOKENIZER_BYTES * path.stat().st_size
    try:
        with Helper(memory=memory, cpu_s=TOKENIZER_S, wait_s=WAIT_S + TOKENIZER_S, imports=["tokenizers"]) as reader:
            reader.call(f"{__name__}:read_tokenizer", str(path))
    except HelperEnded:
        raise UserError(f"loading exceeds the limit of {TOKENIZER_S} s or {memory >> 20} MB") from None
    KNOWN.add(digest)


def read_tokenizer(path: str) -> None:
    """Read a tokenizer and encode a text with it. Raises UserError for any failure."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("What is there?")
    except MemoryError:  # an uncaught MemoryError ends the helper
        raise
    except BaseException as error:  # tokenizers raises Exception, or BaseException when its Rust code panics
        raise UserError(repr(" ".join(str(error).split())[:200])) from None


def render_here(template: str, values: dict[str, Any]) -> str:
    """Render a chat template in this process. Raises UserError for any failure."""
    try:
        text = _compiled(template).render({"tools": None, "documents": None} | values)
    except MemoryError:  # an uncaught MemoryError ends the helper
        raise
    except Exception as error:
        raise UserError(" ".join(str(error).split())[:200] or type(error).__name__) from None
    if len(text) > LONGEST:
        raise UserError(f"output exceeds {LONGEST} characters")
    return str(text)


@lru_cache(8)
def _compiled(template: str) -> Any:
    """Compile a chat template in an environment like that of transformers' ``apply_chat_template``."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag ``{% generation %}``, which marks text for training. Only the text inside the tag is rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)
