"""``graphrot doctor``: what works on this machine, what does not, and the command that mends it.

``facts`` looks at the machine (the part that could crash in a process of its own, ``probe``); ``checks`` turns what
it saw into lines, and touches nothing.
"""

from __future__ import annotations

from graphrot.doctor.checks import Check, examine
from graphrot.doctor.facts import Facts, gather

__all__ = ["Check", "Facts", "examine", "gather"]
