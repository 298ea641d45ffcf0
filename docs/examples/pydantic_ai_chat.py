# An agent, its instructions, and what a run cost.  pip install 'pydantic-ai-slim[openai]'
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python pydantic_ai_chat.py
from pydantic_ai import Agent, ModelSettings

agent = Agent(
    "openai-chat:smol-135m",
    instructions="Answer in one sentence.",
    model_settings=ModelSettings(max_tokens=32, temperature=0),
)
result = agent.run_sync("What is the capital of France?")
print(result.output)
print(f"{result.usage.input_tokens} tokens of prompt, {result.usage.output_tokens} of answer")
