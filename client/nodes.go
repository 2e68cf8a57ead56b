package client

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"strings"

	"agentctl/manifest"
)

// Node is a board as the relay lists it: GET /v1/nodes.
type Node struct {
	NodeID string `json:"node_id"`
	NodeAttributes
	Online     bool  `json:"online"`
	LastSeenMS int64 `json:"last_seen_ms"`
	// Suspect: it is online but does not answer. CloneSuspected: two installations use its
	// identity. An older relay sends neither.
	Suspect        bool `json:"suspect"`
	CloneSuspected bool `json:"clone_suspected"`
	// Capabilities are those of the board's last manifest; none: it has never connected.
	Capabilities []manifest.Capability `json:"capabilities"`
}

// Verbs returns the node's verbs with their capabilities, such as metrics.subscribe.
func (n *Node) Verbs() []string {
	var out []string
	for _, c := range n.Capabilities {
		for _, verb := range c.Verbs {
			out = append(out, c.CapID+"."+verb)
		}
	}
	return out
}

// CallVerbs are the words that ResolveTool takes after NODE: verbs of metrics and history go by
// theirs (snapshot, subscribe, query), other capabilities by their own name (echo, journal).
func (n *Node) CallVerbs() []string {
	var out []string
	for _, c := range n.Capabilities {
		for _, verb := range c.Verbs {
			out = append(out, callVerb(c.CapID, c.Kind, verb))
		}
	}
	return out
}

func callVerb(capID, kind, verb string) string {
	if kind == manifest.KindMetrics || kind == manifest.KindHistory {
		return verb
	}
	return capID
}

// Label is what a person would type for the node: its name, or its id when it has none.
func (n *Node) Label() string { return cmp.Or(n.Name, n.NodeID) }

// errorLabel names the node in an error. A name that its board proposed is untrusted text, which errors do
// not contain (docs/glossary.md, proposed name).
func (n *Node) errorLabel() string {
	if n.NameSet {
		return n.Name
	}
	return n.NodeID
}

// State is online, suspect or offline, and says when a clone is suspected.
func (n *Node) State() string {
	state := "offline"
	switch {
	case n.Suspect:
		state = "suspect"
	case n.Online:
		state = "online"
	}
	if n.CloneSuspected {
		state += ", clone suspected"
	}
	return state
}

// Nodes lists the boards of the token's tenant, offline ones included, ordered by id. With
// tags it lists those that have all of them. It reads all pages: a fleet has thousands of
// boards at most.
func (c *Client) Nodes(ctx context.Context, tags ...string) ([]Node, error) {
	return c.nodes(ctx, url.Values{"tag": tags})
}

// nodes reads all pages of the nodes that query selects.
func (c *Client) nodes(ctx context.Context, query url.Values) ([]Node, error) {
	all := []Node{}
	for after := ""; ; {
		query.Set("after", after)
		var page struct {
			Nodes []Node `json:"nodes"`
			Next  string `json:"next"`
		}
		if err := c.getJSON(ctx, "/v1/nodes?"+query.Encode(), &page); err != nil {
			return nil, err
		}
		all = append(all, page.Nodes...)
		if page.Next == "" || page.Next <= after { // a page that does not advance is the last
			return all, nil
		}
		after = page.Next
	}
}

// Node finds a node by its id, a unique prefix of it, or its name. Its error is a
// *RefError when there is not exactly one.
func (c *Client) Node(ctx context.Context, ref string) (*Node, error) {
	// The relay finds it in its index. An older relay does not know the parameter, and lists all.
	nodes, err := c.nodes(ctx, url.Values{"node": {ref}})
	if err != nil {
		return nil, err
	}
	return findNode(nodes, strings.ToLower(ref))
}

// findNode prefers a full id or a name over a prefix, so that a name that another node's id
// begins with still works.
func findNode(nodes []Node, ref string) (*Node, error) {
	var found *Node
	for i := range nodes {
		n := &nodes[i]
		if n.NodeID == ref || n.Name == ref {
			return n, nil
		}
		if strings.HasPrefix(n.NodeID, ref) {
			if found != nil {
				return nil, refError(ErrAmbiguous, "node", "%q is the beginning of more than one node id; give more of it", ref)
			}
			found = n
		}
	}
	if found == nil {
		return nil, refError(ErrNotFound, "node", "no node has the id, the name or the id prefix %q", ref)
	}
	return found, nil
}

// ResolveTool returns the canonical name of a tool: s itself when it is a full tool name,
// or the tool that NODE:WORD stands for. NODE is a reference as in Client.Node, WORD any of
// manifest.SelectTool, which fleet.call uses too.
//
// A text without a colon is not looked up: the relay refuses a tool that it does not have.
func (c *Client) ResolveTool(ctx context.Context, s string) (string, error) {
	ref, given, ok := strings.Cut(s, ":")
	if !ok {
		return manifest.Canonical(s), nil
	}
	n, err := c.Node(ctx, ref)
	if err != nil {
		return "", err
	}
	var all []manifest.Tool
	for i := range n.Capabilities {
		tools, _ := manifest.Project(n.NodeID, &n.Capabilities[i]) // none of a capability that this version does not know
		all = append(all, tools...)
	}
	if tool, ok := manifest.SelectTool(all, given); ok {
		return tool.Canonical, nil
	}
	if len(n.Capabilities) == 0 {
		return "", fmt.Errorf("node %s %w", n.errorLabel(), ErrNeverLinked)
	}
	return "", refError(ErrNotFound, "tool", "node %s has no verb %q; it has: %s", n.errorLabel(), given, strings.Join(n.Verbs(), " "))
}
