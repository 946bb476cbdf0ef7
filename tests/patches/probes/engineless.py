"""vLLM's own server without an engine: what stands in for the engine's process says given tokens.

Everything else is real: the application with its routes, renderers, parsers and serving objects,
the asynchronous engine with its input and output processors, so detokeniser and stop strings, and
the scheduler's rule of when a request ends.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.request import Request

LENGTH = 4096
OPTIONS = (
    *("--served-model-name", "tiny", "--max-model-len", str(LENGTH), "--enforce-eager"),
    *("--reasoning-parser", "openai_gptoss", "--tool-call-parser", "openai"),
    *("--enable-auto-tool-choice", "--exclude-tools-when-tool-choice-none", "--disable-log-stats"),
)


class Core:
    """Says ``reply``, ``size`` tokens at once, to each request."""

    resources = SimpleNamespace(engine_dead=False)
    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._aborted: set[str] = set()
        self._running: asyncio.Task[None] | None = None
        self.reply: list[int] = []
        self.size = 1
        self.prompt: list[int] = []
        """Of the newest request."""

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def abort_requests_async(self, ids: list[str]) -> None:
        self._aborted.update(ids)

    async def add_request_async(self, request: Any) -> None:
        self.prompt = list(request.prompt_token_ids)
        self._running = asyncio.create_task(
            self._run(Request.from_engine_core_request(request, None))
        )

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    async def _run(self, request: Request) -> None:
        reply = iter(self.reply)
        done = False
        while not done and request.request_id not in self._aborted:
            new: list[int] = []
            while len(new) < self.size and not done:
                new.append(next(reply))
                request.append_output_token_ids(new[-1])
                done = check_stop(request, LENGTH)
            reason = request.get_finished_reason() if done else None
            output = EngineCoreOutput(
                request.request_id, new, finish_reason=reason, stop_reason=request.stop_reason
            )
            self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))
            for _ in range(4):  # else the server would read several outputs as one
                await asyncio.sleep(0)


async def application(model: str) -> tuple[Any, Core]:
    """Return the server's application and its engine."""
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: Core())
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model, *OPTIONS])
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    app.state.engine_client = engine
    return app, engine.engine_core
