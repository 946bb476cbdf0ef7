"""What vLLM's Harmony parser makes of tokens, whole and streamed.

Arguments: a JSON file with ``cases`` (output of a model, stop strings or none), and the file for
the answers: for each case and each cut of it (or the end by a stop string) whole and streamed ones;
what Responses stream of each answer of ``responses``, a pair with the engine's finish reason; which
of ``outputs`` are admitted under the options of ``grammars``.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.entrypoints.openai.responses.context import HarmonyContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.outputs import CompletionOutput, RequestOutput
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from tests.patches.probes.harmony import Tokenizer, parser_class

Parsed = tuple[str | None, str | None, list[list[str]]]


def items(parser: Any, ids: list[int], reason: str) -> list[list[Any]]:
    """Return type, arguments and status of the calls that Responses stream."""
    serving: Any = OpenAIServingResponses.__new__(OpenAIServingResponses)
    serving.tool_server = None
    request: Any = ResponsesRequest(input="hi", stream=True)
    context = HarmonyContext([], [], frozenset({"f"}), parser, request)

    async def outputs() -> AsyncIterator[Any]:
        for at, one in enumerate(ids, 1):
            last = at == len(ids)
            made = CompletionOutput(0, "", [one], None, None, reason if last else None)
            context.append_output(RequestOutput("r", None, [1], None, [made], last))
            yield context

    async def found() -> list[list[Any]]:
        given: Any = (request, None, outputs(), context, "tiny", None, None, 0, lambda event: event)
        stream = serving._process_harmony_streaming_events(*given)
        done = [event.item async for event in stream if event.type == "response.output_item.done"]
        return [[item.type, item.arguments, item.status] for item in done]

    return asyncio.run(found())


def admitted(parser: Any, texts: list[str], **options: Any) -> list[bool]:
    """Return which outputs a request's grammar lets the model write."""
    request = ChatCompletionRequest.model_validate(
        {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **options}
    )
    parser(Tokenizer(), request.tools).adjust_request(request)
    grammar = Grammar.from_structural_tag(request.structured_outputs.structural_tag)
    return [accepts(grammar, text) for text in texts]


def main(asked: Path, out: Path) -> None:
    kind = parser_class()

    def whole(ids: list[int], request: Any) -> Parsed:
        reasoning, content, calls = kind(Tokenizer()).parse("", request, True, ids)
        return reasoning, content, [[one.name, one.arguments] for one in calls or ()]

    def streamed(ids: list[int], request: Any, size: int) -> Parsed:
        parser, texts, calls = kind(Tokenizer()), ["", ""], list[list[str]]()
        for start in range(0, len(ids), size):
            last = start + size >= len(ids)
            delta = parser.parse_delta("", ids[start : start + size], request, finished=last)
            if delta is not None:
                texts[0] += delta.reasoning or ""
                texts[1] += delta.content or ""
                for call in delta.tool_calls:
                    if call.function.name:
                        calls.append([call.function.name, ""])
                    calls[call.index][1] += call.function.arguments or ""
        return texts[0] or None, texts[1] or None, calls

    encoding, answers = get_encoding(), []
    given = json.loads(asked.read_text(encoding="utf-8"))
    streams = [
        items(kind(Tokenizer()), encoding.encode(output, allowed_special="all"), reason)
        for output, reason in given["responses"]
    ]
    for output, stop in given["cases"]:
        messages = [{"role": "user", "content": "Hello"}]
        request = ChatCompletionRequest(model="tiny", messages=messages, stop=stop)
        ids = encoding.encode(output, allowed_special="all")
        ends = range(1, len(ids) + 1)
        if stop:  # the engine ends with the token that completes one
            texts = ((end, encoding.decode(ids[:end])) for end in ends)
            first = next(
                (end for end, text in texts if any(map(text.__contains__, stop))), len(ids)
            )
            ends = range(first, first + 1)
        found = []
        for end in ends:
            steps = [streamed(ids[:end], request, size) for size in (1, 3)]
            found.append([whole(ids[:end], request), *steps])
        answers.append(found)
    try:
        ChatCompletionRequest(model="tiny", messages=[], stop=["fine", "\ud83d"])
        refused = ""
    except ValueError as error:
        refused = str(error)
    grammars = [admitted(kind, given["outputs"], **options) for options in given["grammars"]]
    said = {"answers": answers, "responses": streams, "refused": refused, "admitted": grammars}
    out.write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
