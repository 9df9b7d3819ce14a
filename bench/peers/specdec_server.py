"""specdec's own server, with its defaults."""

from __future__ import annotations

from listening import options

from specdec.config import ServeConfig
from specdec.llm import LLM
from specdec.serve.server import Server

if __name__ == "__main__":
    given = options()
    speculation = "auto" if given.speculation else "off"
    llm = LLM(str(given.model), threads=given.threads, speculation=speculation, max_sequences=given.slots)
    Server(llm, ServeConfig(), "127.0.0.1", given.port, lambda address: None).run()
