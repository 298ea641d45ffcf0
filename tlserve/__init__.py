"""An OpenAI-compatible model server in pure Python: fast on a CPU, the same bytes every time."""
