"""A profile of pins.yaml as the image holds it: settings to serve a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sparkforge.serving import arguments, traffic
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import StartError
from sparkforge.serving.memory import MemoryPlan

_KINDS: Mapping[str, type] = {
    "str": str,
    "str | None": str,
    "int | None": int,
    "bool": bool,
    "bool | None": bool,
}
"""Types of JSON values, by the annotations of a profile's fields."""


_WITHOUT_DECODE_EXPERTS = (
    "--decode-kernels",
    "--moe-backend",
    "--enable-lora",
    "--enable-expert-parallel",
    "--dtype",
)
"""Options with which experts may not go through the decode kernels."""


@dataclass(frozen=True)
class Choice:
    """The settings of a profile that the user's choice determines."""

    mxfp4_layers: str | None = None
    """Dense layers that are quantised while loading; None: none."""


@dataclass(frozen=True)
class Profile:
    """Options of ``vllm serve``, and the entrypoint's checks and actions for the model.

    The build writes it (``Pins.profile_of``), the image reads it. vLLM decides an option that is
    None, and judges the values of the others.

    Attributes:
        model, vocabulary: names in pins.yaml.
        vocabulary_sha256: of the Harmony vocabulary that the chat endpoint has to use.
        cuda_arch: compute capability that the image is built for, as ``12.1``; None: a CPU.
        memory: for a memory that GPU and host share; None: vLLM's own share.
        evict_page_cache: drop the weight files from the page cache before and after loading.
        warm_up: ``off``, ``quick`` or ``full``.
        choices: by name; the user takes one (``choices.pick``).
        choice: the one that counts, in a file the default; None: there are no choices.
        answers: the model has to answer a question at the end of the warm-up.
        expect: backends that vLLM has to choose, by kind (``moe``, ``experts``, ``attention``,
            ``linear``).
        on_mismatch: ``fail`` or ``warn`` where it chooses another.
    """

    model: str | None = None
    moe_backend: str | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    load_format: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    mxfp4_layers: str | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    choice: str | None = None
    reasoning_parser: str | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()
    tool_call_parser: str | None = None
    exclude_tools_when_none: bool = False
    prefix_caching: bool | None = None
    enforce_eager: bool = False
    memory: MemoryPlan | None = None
    evict_page_cache: bool = False
    vocabulary: str | None = None
    vocabulary_sha256: str | None = None
    cuda_arch: str | None = None
    warm_up: str = "off"
    answers: bool = False
    expect: Mapping[str, str] = field(default_factory=dict)
    on_mismatch: str = "fail"

    @classmethod
    def of(cls, document: Document) -> Profile:
        """Return the profile in a JSON document; null stands for the default.

        Raises:
            DocumentError: a key is unknown, a value has another type, or the choices do not fit.
        """
        document.check_keys(field.name for field in fields(cls))
        found = {
            field.name: document.find(_KINDS[str(field.type)], field.name)
            for field in fields(cls)
            if field.type in _KINDS
        }
        values: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
        sizes = document.find(list, "cudagraph_capture_sizes") or []
        expected = document.find(dict, "expect") or {}
        return cls(
            **values,
            cudagraph_capture_sizes=tuple(
                document.get(int, "cudagraph_capture_sizes", index) for index in range(len(sizes))
            ),
            memory=_memory(document),
            choices=_choices(document),
            expect={kind: document.get(str, "expect", kind) for kind in expected},
        )

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Return the profile in a file.

        Raises:
            StartError: it holds no profile.
            OSError: it cannot be read.
        """
        try:
            return cls.of(Document.load(path))
        except DocumentError as error:
            raise StartError(f"invalid profile: {error}") from None

    def document(self) -> dict[str, Any]:
        """Return the profile as JSON values, without defaults."""
        default = asdict(Profile())
        values = {name: value for name, value in asdict(self).items() if value != default[name]}
        if self.choices:
            values["choices"] = {
                name: {key: value for key, value in asdict(choice).items() if value is not None}
                for name, choice in self.choices.items()
            }
        return values

    @property
    def layers(self) -> str | None:
        """Value of ``--mxfp4-layers``: the choice's, if there are choices; None: none."""
        return self.mxfp4_layers if self.choice is None else self.choices[self.choice].mxfp4_layers

    def options(self, *, most_memory: bool = False) -> list[str]:
        """Return the options of ``vllm serve``.

        Args:
            most_memory: add the largest share of memory that the profile allows. The right share
                depends on the machine's free memory: ``memory.utilisation``.
        """
        options: list[str] = []
        if most_memory and self.memory is not None:
            options += ["--gpu-memory-utilization", f"{self.memory.most_percent / 100:.2f}"]
        # names and values are checked with vLLM's own parser in tests/patches/test_profiles.py
        for option, value in (
            ("--moe-backend", self.moe_backend),
            ("--attention-backend", self.attention_backend),
            ("--kv-cache-dtype", self.kv_cache_dtype),
            ("--load-format", self.load_format),
            ("--max-model-len", self.max_model_len),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--mxfp4-layers", self.layers),
            ("--reasoning-parser", self.reasoning_parser),
        ):
            if value is not None:
                options += [option, str(value)]
        if self.cudagraph_capture_sizes:
            sizes = (str(size) for size in self.cudagraph_capture_sizes)
            options += ["--cudagraph-capture-sizes", *sizes]
        if self.tool_call_parser:
            # without the second option, "tool_choice": "auto" gets status 400
            options += ["--tool-call-parser", self.tool_call_parser, "--enable-auto-tool-choice"]
        if self.exclude_tools_when_none:
            # with tools in its prompt the model calls them anyway; vLLM drops the call, and the
            # answer is empty
            options.append("--exclude-tools-when-tool-choice-none")
        if self.prefix_caching is not None:
            no = "" if self.prefix_caching else "no-"
            options.append(f"--{no}enable-prefix-caching")
        if self.enforce_eager:
            options.append("--enforce-eager")
        return options

    def expectations(self, command: Sequence[str], caller: Sequence[str]) -> dict[str, str]:
        """Return the backends that vLLM has to choose, by kind.

        A backend in the user's options replaces the profile's, and is not checked. vLLM logs the
        backend of dense layers only where ``--mxfp4-layers`` quantises some.

        Args:
            command: all options of the server.
            caller: the user's options among them.
        """
        expected = {
            kind: name
            for kind, name in self.expect.items()
            if not arguments.has(caller, f"--{kind}-backend")
        }
        layers = (arguments.value(command, "--mxfp4-layers") or "").split(",")
        if not {layer.partition("=")[0].strip() for layer in layers} - {"", "moe"}:
            expected.pop("linear", None)
        if arguments.has(caller, "--decode-kernels"):  # which are the profile's choice for these
            expected.pop("linear", None)
        if any(arguments.has(caller, option) for option in _WITHOUT_DECODE_EXPERTS):
            expected.pop("experts", None)
        return expected


def _memory(document: Document) -> MemoryPlan | None:
    if not document.find(dict, "memory"):
        return None
    return MemoryPlan(
        keep_free_gib=document.get(int, "memory", "keep_free_gib"),
        most_percent=document.get(int, "memory", "most_percent"),
        least_gib=document.get(int, "memory", "least_gib"),
    )


def _choices(document: Document) -> dict[str, Choice]:
    names = document.find(dict, "choices") or {}
    found = {}
    for name in names:
        inner = Document(f"{name} of {document.what}", document.get(dict, "choices", name))
        inner.check_keys(field.name for field in fields(Choice))
        layers = inner.find(str, "mxfp4_layers")
        try:
            traffic.parse_layers(layers or "moe")
        except traffic.LayersError as error:
            raise DocumentError(f"mxfp4_layers of {inner.what}: {error}") from None
        found[name] = Choice(layers)
    chosen = document.find(str, "choice")
    if chosen not in (found or {None}):
        raise DocumentError(f"choice of {document.what} is {chosen!r}, which is not in choices")
    if found and document.find(str, "mxfp4_layers") is not None:
        raise DocumentError(f"{document.what} has both mxfp4_layers and choices")
    return found
