package process

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"go.uber.org/zap"

	"agentctl/lazyregexp"
	"agentctl/relay/kernel"
)

// A manifest says what may be offered, and the server's lists say what of it the server has. They are
// compared at each connection, and after each notification that a list has changed:
//
//	tool with a digest   listed as it was adopted   offered
//	                     listed differently         withdrawn, until it is adopted again
//	                     not listed                 withdrawn, until it is listed again
//	tool without one     not listed                 the plugin does not start
//	resource, prompt     not listed                 not offered, until it is listed again
//	resource, new        offered if the manifest follows the server's list
//	tool, prompt, new    not offered; operators are informed
//
// So a server that lists harmless tools until it is trusted, and other ones later, cannot offer the others
// to clients. A manifest without a command was written for its server: there, a missing resource is an
// error, too.
const (
	// settleTime is how long a server may take to list all that was adopted: some register tools
	// after the handshake.
	settleTime   = 1500 * time.Millisecond
	settlePoll   = 300 * time.Millisecond
	relistPause  = time.Second     // between two comparisons because of list_changed
	eventTimeout = 5 * time.Second // to append the event of a withdrawn tool
	maxNamed     = 5               // names of new tools in a note
)

// eventPlugin is the type of the event of a withdrawn tool: that of all changes of plugins.
const eventPlugin = "kernel.plugin"

// offer is what of a manifest is offered. The zero value offers all of it.
type offer struct {
	manifest     *kernel.Manifest  // nil: that of the source
	withdrawn    map[string]string // why, by name of the tool; a changed one stays in it
	noPrompts    map[string]bool   // prompts that the server does not list
	canSubscribe bool              // the server reports changes of resources
	canComplete  bool              // it completes arguments
	notes        []string
}

// Why a tool is withdrawn.
const (
	reasonChanged  = "the server describes it differently from when it was adopted"
	reasonVanished = "the server does not list it any more"
)

// isAdopted reports whether the server was not written for the relay.
func (p *Plugin) isAdopted() bool { return p.declared != nil && len(p.declared.Command) > 0 }

// lists is what a server lists, by its own names.
type lists struct {
	tools     map[string]string // the digest
	resources map[string]json.RawMessage
	prompts   map[string]bool
}

// toolDigest is the digest of a tool as the server lists it. Spelling and order of members make no
// difference; _meta is left out, since the relay does not show it.
func toolDigest(raw json.RawMessage) string {
	canonical := jsontext.Value(raw)
	var tool map[string]json.RawMessage
	if json.Unmarshal(raw, &tool) == nil {
		delete(tool, "_meta")
		if b, err := json.Marshal(tool); err == nil {
			canonical = b
		}
	}
	_ = canonical.Canonicalize() // duplicate names are an error, and the bytes stay
	sum := sha256.Sum256(canonical)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// readLists reads the lists that the manifest has something of. A server may not support others.
func (p *Plugin) readLists(ctx context.Context, c *conn) (l lists, err error) {
	if len(p.manifest.Tools) > 0 {
		items, err := c.list(ctx, "tools/list", "tools")
		if err != nil {
			return l, err
		}
		l.tools = make(map[string]string, len(items))
		for _, raw := range items {
			name, digest := nameOf(raw, "name"), toolDigest(raw)
			if old, twice := l.tools[name]; twice && old != digest {
				digest = "" // which one a client would get is the server's choice
			}
			l.tools[name] = digest
		}
	}
	if len(p.manifest.Resources) > 0 || p.follows() {
		items, err := c.list(ctx, "resources/list", "resources")
		if err != nil {
			return l, err
		}
		l.resources = make(map[string]json.RawMessage, len(items))
		for _, raw := range items {
			l.resources[p.publicURI(nameOf(raw, "uri"))] = raw
		}
	}
	if p.declared != nil && len(p.declared.Prompts) > 0 {
		items, err := c.list(ctx, "prompts/list", "prompts")
		if err != nil {
			return l, err
		}
		l.prompts = make(map[string]bool, len(items))
		for _, raw := range items {
			l.prompts[nameOf(raw, "name")] = true
		}
	}
	return l, nil
}

// nameOf returns a member of an element of a list.
func nameOf(raw json.RawMessage, key string) (name string) {
	var item map[string]json.RawMessage
	_ = json.Unmarshal(raw, &item)
	_ = json.Unmarshal(item[key], &name) // "" for none
	return name
}

// follows reports whether resources that the server lists later are offered too.
func (p *Plugin) follows() bool { return p.declared != nil && p.declared.FollowResources }

// missing returns the first thing that the manifest declares and the server does not list. With
// strict it ignores what checkServed can withdraw.
func (p *Plugin) missing(l lists, strict bool) error {
	for _, t := range p.manifest.Tools {
		if _, ok := l.tools[p.serverName(t.Name)]; !ok && !(strict && p.digestOf(t.Name) != "") {
			return fmt.Errorf("plugin.json has the tool %s, tools/list of the server has not", t.Name)
		}
	}
	if strict && p.isAdopted() {
		return nil
	}
	for _, r := range p.manifest.Resources {
		if _, ok := l.resources[r.URI]; !ok {
			return fmt.Errorf("plugin.json has the resource %s, resources/list of the server has not", r.URI)
		}
	}
	if p.declared == nil {
		return nil
	}
	for _, d := range p.declared.Prompts {
		if !l.prompts[promptServerName(&d)] {
			return fmt.Errorf("plugin.json has the prompt %s, prompts/list of the server has not", d.Name)
		}
	}
	return nil
}

// checkServed compares the server's lists with the manifest, and offers what both have.
func (p *Plugin) checkServed(ctx context.Context, c *conn) error {
	l, err := p.readLists(ctx, c)
	if err != nil {
		return err
	}
	// Wait until everything is listed, for settleTime at most. What is missing then is withdrawn, or an
	// error.
	for end := time.Now().Add(settleTime); p.isAdopted() && p.missing(l, false) != nil && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.ended:
			return errors.New("its connection ended")
		case <-c.listsChanged:
		case <-time.After(settlePoll):
		}
		if l, err = p.readLists(ctx, c); err != nil {
			return err
		}
	}
	if err := p.missing(l, true); err != nil {
		return err
	}
	p.applyLists(l, c.server.Capabilities.Resources != nil && c.server.Capabilities.Resources.Subscribe, c.server.Capabilities.Completions != nil)
	return nil
}

// followLists compares the lists again when the server says that they have changed, until the
// connection ends. Notifications during a comparison and its pause lead to one more comparison.
func (c *conn) followLists() {
	for {
		select {
		case <-c.ended:
			return
		case <-c.listsChanged:
		}
		if !c.plugin.isAdopted() {
			continue // its manifest alone decides what is offered
		}
		ctx, cancel := context.WithTimeout(context.Background(), initializeTimeout)
		if err := c.plugin.checkServed(ctx, c); err != nil {
			c.plugin.log.Warn("plugin's lists were not compared with its manifest", zap.String("error", printable(err.Error())))
		}
		cancel()
		select {
		case <-c.ended:
			return
		case <-time.After(relistPause):
		}
	}
}

// applyLists offers what both the manifest and the lists have.
func (p *Plugin) applyLists(l lists, canSubscribe, canComplete bool) {
	p.mu.Lock()
	before := p.offer
	now := p.compare(l, before.withdrawn)
	now.canSubscribe, now.canComplete = canSubscribe, canComplete
	isSame := before.manifest != nil && slices.Equal(before.manifest.Tools, now.manifest.Tools) &&
		slices.EqualFunc(before.manifest.Resources, now.manifest.Resources, func(a, b *kernel.Resource) bool { return *a == *b })
	if isSame {
		now.manifest = before.manifest
	}
	p.offer = now
	p.mu.Unlock()

	// mu is not held: Refresh calls Manifest, which takes it.
	if p.kernel != nil && !isSame {
		if err := p.kernel.Refresh(p); err != nil && !errors.Is(err, kernel.ErrNotLoaded) {
			p.log.Error("what the plugin offers was not updated", zap.Error(err))
		}
	}
	if p.kernel != nil && !maps.Equal(before.noPrompts, now.noPrompts) {
		p.kernel.NotifyChange(p.manifest.Tenant, kernel.Change{Prompts: true})
	}
	for _, note := range now.notes {
		if !slices.Contains(before.notes, note) {
			p.log.Warn("plugin differs from its manifest", zap.String("note", note))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(now.withdrawn)) {
		if before.withdrawn[name] != now.withdrawn[name] {
			p.recordWithdrawn(name, now.withdrawn[name])
		}
	}
}

// compare makes the offer of the lists. withdrawn are the tools that were withdrawn before.
func (p *Plugin) compare(l lists, withdrawn map[string]string) offer {
	m := *p.manifest
	o := offer{manifest: &m, withdrawn: make(map[string]string), noPrompts: make(map[string]bool)}
	m.Tools, m.Resources = nil, nil
	known := make(map[string]bool)
	for _, t := range p.manifest.Tools {
		name := p.serverName(t.Name)
		known[name] = true
		digest, isListed := l.tools[name]
		want := p.digestOf(t.Name)
		switch {
		// A tool that was different once stays withdrawn, even if it is listed as before: otherwise a
		// server could show the harmless tool to the operator and another one to clients.
		case withdrawn[t.Name] == reasonChanged || isListed && want != "" && digest != want:
			o.withdrawn[t.Name] = reasonChanged
		case !isListed:
			o.withdrawn[t.Name] = reasonVanished
		default:
			m.Tools = append(m.Tools, t)
			continue
		}
		o.notes = append(o.notes, fmt.Sprintf("the tool %s is withdrawn: %s", t.Name, o.withdrawn[t.Name]))
	}
	declared := make(map[string]bool)
	for _, r := range p.manifest.Resources {
		declared[r.URI] = true
		if _, ok := l.resources[r.URI]; ok {
			m.Resources = append(m.Resources, r)
		}
	}
	if p.follows() {
		for _, uri := range slices.Sorted(maps.Keys(l.resources)) {
			if len(m.Resources) < kernel.MaxToolsPerPlugin && !declared[uri] && publicForm.MatchString(uri) && len(uri) <= maxURI {
				m.Resources = append(m.Resources, p.followedResource(uri, l.resources[uri]))
			}
		}
	}
	if p.declared != nil {
		for i := range p.declared.Prompts {
			if d := &p.declared.Prompts[i]; !l.prompts[promptServerName(d)] {
				o.noPrompts[d.Name] = true
			}
		}
	}
	if p.isAdopted() {
		if added := unknownNames(l.tools, known, p.declared.Ignored); added != "" {
			o.notes = append(o.notes, "the server has tools that plugin.json does not have, and that are not offered: "+added)
		}
	}
	if len(o.notes) > 0 {
		o.notes = append(o.notes, "review the server and adopt it again: agentctl plugin adopt "+m.Name+" --again")
	}
	return o
}

// publicForm is the form of a URI that a followed resource has, as plugin.schema.json has it.
var publicForm = lazyregexp.New(`^mcp://[a-z0-9_]+/[!-~]+$`)

// maxURI bounds a URI, bytes, as plugin.schema.json does.
const maxURI = 512

// mediaType is the form of a MIME type, as plugin.schema.json has it.
var mediaType = lazyregexp.New(`^[A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+(;[ -~]*)?$`)

// followedResource is a resource that nobody has reviewed: of the server's words it has the URI only.
func (p *Plugin) followedResource(uri string, raw json.RawMessage) *kernel.Resource {
	r := &kernel.Resource{URI: uri, Name: strings.TrimPrefix(uri, "mcp://"), Scope: p.declared.scope("", 0)}
	if mime := nameOf(raw, "mimeType"); len(mime) <= 128 && mediaType.MatchString(mime) {
		r.MIME = mime
	}
	return r
}

// unknownNames lists the tools that could be adopted and are neither known nor ignored, at most maxNamed.
func unknownNames(tools map[string]string, known map[string]bool, ignored []string) string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(tools)) {
		if !known[name] && canBeDeclared(name) && !slices.Contains(ignored, name) {
			names = append(names, printable(name[:min(len(name), 64)]))
		}
	}
	if n := len(names) - maxNamed; n > 0 {
		names = append(names[:maxNamed], fmt.Sprintf("%d more", n))
	}
	return strings.Join(names, ", ")
}

// recordWithdrawn appends the event of a withdrawn tool. The reason is one of the relay's own.
func (p *Plugin) recordWithdrawn(tool, reason string) {
	if p.events == nil {
		return
	}
	// The payload quotes no text of the server. If it cannot be stored, the tool stays withdrawn.
	payload, _ := json.Marshal(map[string]string{"action": "withdraw", "name": p.manifest.Name, "tool": tool, "reason": reason})
	ctx, cancel := context.WithTimeout(context.Background(), eventTimeout)
	defer cancel()
	if _, err := p.events.Append(ctx, kernel.Event{Type: eventPlugin, Aggregate: p.manifest.Name, Payload: payload}); err != nil {
		p.log.Warn("the event of a withdrawn tool was not kept", zap.String("tool", tool), zap.Error(err))
	}
}
