"""Finds stop strings in text that arrives in pieces. Pure.

The text is cut right before the stop string that is complete first; of several that are complete at the same
character, the longest counts. Both hold whatever the pieces are. Linear time: Aho and Corasick, 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopScanner:
    """Passes text on, except for a tail that may still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._trie = _Trie(stops)
        self._state = 0
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """Text that can no longer be part of a stop string. Empty once `stopped`."""
        trie, state = self._trie, self._state
        if self.stopped or not piece:
            return ""
        if state == 0 and trie.firsts.isdisjoint(piece):
            return piece
        edges, falls, found = trie.edges, trie.falls, trie.found
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            while state and char not in edges[state]:
                state = falls[state]
            state = edges[state].get(char, 0)
            if found[state]:
                self.stopped = True
                self._held = ""
                return text[: end - found[state]]
        self._state = state
        certain = len(text) - trie.depths[state]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The held tail, when no more text will come."""
        tail, self._held, self._state = self._held, "", 0
        return tail


class _Trie:
    """All prefixes of all stop strings, numbered; 0 is the empty one.

    For prefix n: `edges[n]` to the prefixes one character longer, `falls[n]` the longest proper suffix that is
    a prefix too, `depths[n]` its length, `found[n]` the length of the longest stop string that it ends with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.found = [0]
        for stop in stops:
            node = 0
            for char in stop:
                if char not in self.edges[node]:
                    self.edges[node][char] = len(self.edges)
                    self.edges.append({})
                    self.depths.append(self.depths[node] + 1)
                    self.found.append(0)
                node = self.edges[node][char]
            self.found[node] = len(stop)
        self.falls = [0] * len(self.edges)
        self.firsts = frozenset(self.edges[0])
        self._link()

    def _link(self) -> None:
        queue = deque(self.edges[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.edges[node].items():
                fall = self.falls[node]
                while fall and char not in self.edges[fall]:
                    fall = self.falls[fall]
                self.falls[child] = self.edges[fall].get(char, 0)
                # A whole prefix that is a stop string is longer than any that it ends with.
                self.found[child] = self.found[child] or self.found[self.falls[child]]
                queue.append(child)
