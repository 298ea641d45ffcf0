# Which text is nearest to a question? LangChain has to send text, not token ids.  pip install langchain-openai numpy
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python langchain_embeddings.py
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

TEXTS = ["The cat sleeps on the sofa.", "Interest rates rose again.", "A dog runs through the park."]

# Else it would cut the text into tokens of OpenAI's models, whose ids mean something else here.
embeddings = OpenAIEmbeddings(model="smol-135m", check_embedding_ctx_length=False)
store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
for document, similarity in store.similarity_search_with_score("Where is the kitten?", k=len(TEXTS)):
    print(f"{similarity:.4f} {document.page_content}")
