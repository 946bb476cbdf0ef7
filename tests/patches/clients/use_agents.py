"""The Agents SDK: its own loop, over Responses and chats, whole and streamed."""

import asyncio
import sys
from typing import Any

import agents
import openai

from tests.patches.clients.tools import FUNCTIONS, report

URL, KEY, MODEL, JOB, CUT = sys.argv[1:]


async def work(model: agents.Model, *, streamed: bool) -> None:
    # strict tools are the default there, and vLLM's grammar for them allows one call in a turn
    tools = [agents.function_tool(tool) for tool in FUNCTIONS.values()]

    async def ask(content: str, **settings: Any) -> Any:
        options = agents.ModelSettings(**settings)
        agent = agents.Agent("worker", tools=[*tools], model=model, model_settings=options)
        if not streamed:
            return await agents.Runner.run(agent, content)
        found = agents.Runner.run_streamed(agent, content)
        async for _ in found.stream_events():
            pass
        return found

    done = await ask(JOB)
    try:
        cut = (await ask(CUT, max_tokens=20)).final_output
    except agents.ModelBehaviorError as error:
        cut = str(error)
    report(done.final_output, cut)


async def main() -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        for streamed in (False, True):
            await work(kind(MODEL, client), streamed=streamed)


asyncio.run(main())
