"""vLLM's renderer and parser of gpt-oss, without a server."""

from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.online_renderer import OnlineRenderer


class Tokenizer:
    """What the parser wants of one."""

    def get_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int]) -> str:
        return str(get_encoding().decode(ids))


def parser_class() -> Any:
    """Return the class of parser that a server of gpt-oss has."""
    return ParserManager.get_parser(
        tool_parser_name="openai",
        reasoning_parser_name="openai_gptoss",
        enable_auto_tools=True,
        model_name="tiny",
        is_harmony=True,
    )


def renderer(max_model_len: int) -> Any:
    """Return a renderer with what one of gpt-oss reads."""
    one: Any = OnlineRenderer.__new__(OnlineRenderer)
    vars(one).update(
        {"parser": None, "chat_template": None, "chat_template_content_format": "auto"},
        default_chat_template_kwargs={},
        reasoning_effort_map={},
        use_harmony=True,
        supports_browsing=False,
        supports_code_interpreter=False,
        trust_request_chat_template=False,
        exclude_tools_when_tool_choice_none=True,
        renderer=SimpleNamespace(tokenizer=None),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )
    return one
