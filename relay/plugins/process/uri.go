package process

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/yosida95/uritemplate/v3"

	"agentctl/lazyregexp"
	"agentctl/relay/kernel"
)

// The URIs of a server that was adopted are its own (file:///a, demo://b), and another server may
// have the same. Clients see each below the name of its plugin:
//
//	server   file:///srv/a.txt                  demo://text/{id}
//	client   mcp://NAME/file:///srv/a.txt       mcp://NAME/demo://text/{id}
//
// What a client gets with a URI is therefore always of the plugin that the URI names, and a
// file: URI of a server is not taken for a file of the client. Links to web pages (http, https) stay:
// clients open those themselves. A URI that begins with mcp://NAME/ is the server's own.

// scheme begins an absolute URI (RFC 3986 §3.1).
var scheme = lazyregexp.New(`^[A-Za-z][A-Za-z0-9+.-]*:`)

// serverURI returns the URI at the server of a plugin's resource that clients know as uri.
func serverURI(plugin, uri string) string {
	if rest, ok := strings.CutPrefix(uri, "mcp://"+plugin+"/"); ok && scheme.MatchString(rest) {
		return rest
	}
	return uri
}

// publicURI returns the URI that clients know for a resource of a plugin's server. Characters that no
// URI has are escaped.
func publicURI(plugin, uri string) string {
	if strings.HasPrefix(uri, "mcp://"+plugin+"/") {
		return uri
	}
	var b strings.Builder
	b.WriteString("mcp://" + plugin + "/")
	for _, c := range []byte(uri) {
		if c <= ' ' || c > '~' {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// publicURI is publicURI for a server that was adopted. One that was written for the relay has
// mcp: URIs already.
func (p *Plugin) publicURI(uri string) string {
	if !p.isAdopted() {
		return uri
	}
	return publicURI(p.manifest.Name, uri)
}

// publishLinks replaces the URIs of linked and embedded resources in content blocks, in place.
func (p *Plugin) publishLinks(blocks []json.RawMessage) {
	if !p.isAdopted() {
		return
	}
	for i, block := range blocks {
		if bytes.Contains(block, []byte("uri")) {
			blocks[i] = p.publishLink(block)
		}
	}
}

// publishLink is publishLinks for one block. What is no such block stays.
func (p *Plugin) publishLink(block json.RawMessage) json.RawMessage {
	var b map[string]json.RawMessage
	var kind string
	if json.Unmarshal(block, &b) != nil || json.Unmarshal(b["type"], &kind) != nil {
		return block
	}
	switch kind {
	case "resource_link":
		if uri := p.replaceURI(b); p.follows() {
			p.rememberLink(uri, nameOf(block, "mimeType"))
		}
	case "resource":
		var r map[string]json.RawMessage
		if json.Unmarshal(b["resource"], &r) != nil {
			return block
		}
		p.replaceURI(r)
		b["resource"], _ = json.Marshal(r)
	default:
		return block
	}
	out, _ := json.Marshal(b) // of values that were decoded from JSON
	return out
}

// replaceURI replaces the member uri of a resource, unless it is the address of a web page, and returns
// the new one.
func (p *Plugin) replaceURI(r map[string]json.RawMessage) string {
	var uri string
	if json.Unmarshal(r["uri"], &uri) != nil || strings.HasPrefix(uri, "https://") || strings.HasPrefix(uri, "http://") {
		return ""
	}
	uri = p.publicURI(uri)
	r["uri"], _ = json.Marshal(uri)
	return uri
}

// maxLinks bounds the links that are remembered.
const maxLinks = 256

// rememberLink makes a resource readable that the server has linked to in a result: it may be in no
// list, or not yet. The oldest link is forgotten first.
func (p *Plugin) rememberLink(uri, mime string) {
	if len(uri) > maxURI || !publicForm.MatchString(uri) {
		return
	}
	r := kernel.Resource{URI: uri, Name: strings.TrimPrefix(uri, "mcp://"), Scope: p.declared.scope("", 0), MIME: mediaTypeOf(mime)}
	p.mu.Lock()
	defer p.mu.Unlock()
	// A link that the plugin returns again becomes the newest; the oldest one is dropped first.
	p.links = slices.DeleteFunc(p.links, func(o kernel.Resource) bool { return o.URI == uri })
	if len(p.links) == maxLinks {
		p.links = slices.Delete(p.links, 0, 1)
	}
	p.links = append(p.links, r)
}

// template is a compiled resource template.
type template struct {
	declared DeclaredTemplate
	matches  *regexp.Regexp
	resource kernel.Resource // without its URI
}

// compileTemplates compiles the templates of a manifest, which ParseManifest has checked.
func (pm *PluginManifest) compileTemplates() (list []template, err error) {
	for _, t := range pm.ResourceTemplates {
		u, err := uritemplate.New(t.URITemplate)
		if err != nil {
			return nil, fmt.Errorf("uriTemplate %s: %w", t.URITemplate, err)
		}
		list = append(list, template{t, u.Regexp(), kernel.Resource{
			Name: t.Name, Description: t.Description, MIME: t.MIMEType, Scope: pm.scope(t.Capability, 0),
		}})
	}
	return list, nil
}

// ResolveURI implements kernel.TemplateResolver.
func (p *Plugin) ResolveURI(uri string) *kernel.Resource {
	for i := range p.templates {
		if t := &p.templates[i]; t.matches.MatchString(uri) {
			r := t.resource
			r.URI = uri
			p.mu.Lock()
			r.Watchable = p.offer.canSubscribe
			p.mu.Unlock()
			return &r
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.IndexFunc(p.links, func(r kernel.Resource) bool { return r.URI == uri }); i >= 0 {
		r := p.links[i]
		return &r
	}
	return nil
}
