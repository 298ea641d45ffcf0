# Which text says nearly the same? LangChain has to send text, not token ids.  pip install langchain-openai numpy
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python langchain_embeddings.py
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

TEXTS = ["Interest rates rose again.", "A kitten is sleeping on the couch.", "The train leaves at nine."]

# Else it would cut the text into tokens of OpenAI's models, whose ids mean something else here.
embeddings = OpenAIEmbeddings(model="smol-135m", check_embedding_ctx_length=False)
store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
for document, similarity in store.similarity_search_with_score("A cat sleeps on the sofa.", k=len(TEXTS)):
    print(f"{similarity:.4f} {document.page_content}")
