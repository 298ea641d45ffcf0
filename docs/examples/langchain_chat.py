# A chain of prompt, model and parser, and what a chat cost.  pip install langchain-openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python langchain_chat.py
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="smol-135m", max_tokens=32, temperature=0)
prompt = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "{question}")])

chain = prompt | model | StrOutputParser()
print(chain.invoke({"question": "What is the capital of France?"}))

message = model.invoke("Name three colours.")
assert message.usage_metadata is not None
print(f"{message.usage_metadata['input_tokens']} tokens of prompt, {message.usage_metadata['output_tokens']} of answer")
