# How near are two texts?  pip install litellm
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python litellm_embeddings.py
import litellm

reply = litellm.embedding(model="openai/smol-135m", input=["A cat sleeps on the sofa.", "A kitten is sleeping."])
first, second = (item["embedding"] for item in reply.data)
print(f"{len(first)} dimensions, cosine {sum(x * y for x, y in zip(first, second, strict=True)):.4f}")
