# The vector of a text.  pip install 'pydantic-ai-slim[openai]'
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python pydantic_ai_embeddings.py
from pydantic_ai import Embedder

embedder = Embedder("openai:smol-135m")
result = embedder.embed_query_sync("The cat sleeps.")
print(f"{len(result.embeddings[0])} dimensions, {result.usage.input_tokens} tokens")
