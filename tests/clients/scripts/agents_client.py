"""Agents of two frameworks go to their ends, with two tools: a grammar makes each call, the model chooses
which."""

import asyncio
import sys
from typing import Literal

import agents
import openai
from checks import BASE_URL, KEY, MODEL, Checks
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, ModelSettings, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

checks = Checks("openai-agents", "pydantic-ai-slim")
agents.set_tracing_disabled(True)
called: list[str] = []
City = Literal["Rome", "Oslo"]


class AgentsAnswer(BaseModel):
    """The end."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(max_length=20)


def get_data(city: City) -> str:
    """Data of a city."""
    called.append("get_data")
    return f"data of {city}"


def get_time(city: City) -> str:
    """The time in a city."""
    called.append("get_time")
    return f"noon in {city}"


with checks.check("OpenAI's agents: a tool, its result, an answer") as seen:
    client = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY)
    agent = agents.Agent(
        name="guide",
        model=agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=200, extra_body={"seed": 3}
        ),
        tools=[agents.function_tool(get_data), agents.function_tool(get_time)],
    )
    result = asyncio.run(agents.Runner.run(agent, "Data and time of Rome?"))
    assert called
    seen += [called, repr(result.final_output[:30])]
with checks.check("Pydantic AI: both tools are called, then it ends with an object") as seen:
    provider = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key=KEY)
    for seed in range(40):
        called.clear()
        agent = Agent(
            OpenAIChatModel(MODEL, provider=provider),
            tools=[get_data, get_time],
            output_type=ToolOutput(AgentsAnswer, name="get_answer"),
            retries=3,
            model_settings=ModelSettings(temperature=1.5, seed=seed, parallel_tool_calls=False),
        )
        result = agent.run_sync("Data and time of Rome?")
        if {"get_data", "get_time"} <= set(called):
            break
    assert {"get_data", "get_time"} <= set(called)
    seen += [f"seed {seed}", called, result.output]
sys.exit(checks.tell())
