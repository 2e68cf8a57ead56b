package mcp

import (
	"net/url"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Words of ?toolset=, besides the names of plugins.
var toolsets = []struct {
	word string
	set  kernel.Toolset
}{
	{"fleet", kernel.FleetToolset},
	{"boards", kernel.BoardsToolset},
	{"all", kernel.AllTools},
}

// maxToolsetWords bounds the words of ?toolset=.
const maxToolsetWords = 16

// readQuery reads what the query of /mcp selects: ?toolset= and ?names=flat. Both decide what the
// lists have and how they spell it; neither keeps a caller from calling a tool by its name.
//
// A word that means nothing is refused, but not in a session: a plugin that is unloaded for a moment
// must not end the sessions whose URL names it. Its tools are then missing from their lists.
func (h *Handler) readQuery(x *exchange, rawQuery string, inSession bool) *manifest.Error {
	if rawQuery == "" {
		return nil
	}
	q, err := url.ParseQuery(rawQuery)
	if err != nil {
		return manifest.E(manifest.BadRequest, "the query of the URL is malformed; use ?toolset=fleet&names=flat")
	}
	x.flatNames = q.Get("names") == "flat"
	if !q.Has("toolset") {
		return nil
	}
	words := strings.Split(strings.Join(q["toolset"], ","), ",")
	var set kernel.Toolset
	for i, word := range words {
		s, ok := toolsetOf(word)
		switch {
		case i >= maxToolsetWords:
			return manifest.E(manifest.BadRequest, "toolset has too many words; use at most 16")
		case ok:
			set = set.And(s)
		case inSession || slices.Contains(h.opts.Kernel.PluginNames(x.caller), word):
			set = set.WithPlugin(word)
		default:
			return h.unknownToolset(x.caller)
		}
	}
	x.toolset = set
	return nil
}

func toolsetOf(word string) (kernel.Toolset, bool) {
	for _, t := range toolsets {
		if t.word == word {
			return t.set, true
		}
	}
	return kernel.Toolset{}, false
}

// unknownToolset says which words a caller may use.
func (h *Handler) unknownToolset(c *kernel.Caller) *manifest.Error {
	var words []string
	for _, t := range toolsets {
		words = append(words, t.word)
	}
	for _, name := range h.opts.Kernel.PluginNames(c) {
		if !slices.Contains(words, name) {
			words = append(words, name)
		}
	}
	return manifest.E(manifest.BadRequest, "toolset has an unknown word; use one or more of these with commas between them: "+strings.Join(words, ", ")+
		"; without toolset the list has echo and metrics of the boards, and the relay's own tools")
}

// listsBoards reports whether a stream of the session is of a client whose list of tools has boards.
func (s *session) listsBoards() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.streams {
		if x.toolset.HasBoards() {
			return true
		}
	}
	return false
}
