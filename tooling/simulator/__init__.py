"""A vLLM pod as a model (`engine`), over sockets in real time (`server`), and what users send it (`workloads`)."""
