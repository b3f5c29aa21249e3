"""Ready-made tools, for a ToolLoop or the user's generate function.

    from sluice_rollout.toolbox import Http, Python, Search

    play = ToolLoop([Python(), Search("corpus.jsonl")])

A tool has a `name`, a `definition` in OpenAI's form for the rows' column `tools`, and `session()`:
a function of its arguments by name, for one episode. If the model may be at fault, the answer says
so in its text; otherwise the tool raises ToolUnavailableError.
"""

from sluice_rollout.toolbox.base import Tool, definition_of
from sluice_rollout.toolbox.http import Http
from sluice_rollout.toolbox.mcp import Mcp
from sluice_rollout.toolbox.python import Python
from sluice_rollout.toolbox.search import Retriever, Search
from sluice_rollout.toolbox.shell import Shell

__all__ = ["Http", "Mcp", "Python", "Retriever", "Search", "Shell", "Tool", "definition_of"]
