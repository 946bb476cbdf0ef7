"""LangChain: an agent with tools, over chats and Responses, whole and streamed."""

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.patches.clients.tools import FUNCTIONS, report

URL, KEY, MODEL, JOB, CUT = sys.argv[1:]


def work(*, responses: bool, streamed: bool) -> None:
    def ask(content: str, **options: Any) -> Any:
        words = {"use_responses_api": responses, "streaming": streamed, **options}
        model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0, **words)
        agent = create_agent(model, [tool(one) for one in FUNCTIONS.values()])
        asked: Any = {"messages": [{"role": "user", "content": content}]}
        return agent.invoke(asked)["messages"][-1]

    answer = ask(JOB).text
    cut = ask(CUT, max_tokens=20).response_metadata
    report(answer, cut.get("incomplete_details") or cut.get("finish_reason"))


for way in (False, True):
    for stream in (False, True):
        work(responses=way, streamed=stream)
