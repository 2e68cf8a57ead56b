package process

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/creachadair/jrpc2"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/sandbox"
)

// Adoption makes a manifest from a server's lists, for a person to review:
//
//	start    in the sandbox that the plugin will have, with an empty folder for data
//	settle   the lists are read once they have not changed for listQuiet
//	add      each tool, resource, template and prompt is checked separately: one that cannot be declared
//	         is left out with the reason, and the others stay
//	check    the whole manifest is parsed like one from a file
//
// Names, titles and descriptions are those of the server, made printable (text.go). The operator accepts
// them with the manifest. A digest of each tool shows later whether the server has changed them.

// AdoptOptions say which MCP server becomes a plugin. Name, Folder and Command must be given.
type AdoptOptions struct {
	Name    string
	Folder  string   // where the server starts; the plugin's folder, or one that will be moved there
	Command []string // as in a manifest
	Env     map[string]string
	Sandbox DeclaredSandbox

	Private   []string            // as Options.Private
	NoSandbox bool                // as Options.NoSandbox
	User      *syscall.Credential // the relay's user, if that is not the user of this process
	Version   string              // of the relay
	Timeout   time.Duration       // for the start and all lists; default AdoptTimeout
}

// AdoptTimeout is how long a server may take to start and to list what it has.
const AdoptTimeout = 30 * time.Second

// listQuiet is how long the lists of a server must not change before they are taken as complete: some
// register tools after the handshake.
const listQuiet = 700 * time.Millisecond

// Adoption is what a server offers, as a manifest for review.
type Adoption struct {
	Manifest *PluginManifest
	JSON     []byte // of plugin.json
	Server   string // what it calls itself, and its version
	Protocol string // version of MCP
	LeftOut  []LeftOut
}

// LeftOut is a tool, resource or prompt of a server that its manifest does not have.
type LeftOut struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// AdoptError is the error of a server that cannot be adopted. Stderr has the end of what it wrote
// there, in printable characters.
type AdoptError struct {
	Err    error
	Stderr string
}

func (e *AdoptError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *AdoptError) Unwrap() error { return e.Err }

// Adopt starts a server in the sandbox that it will have as a plugin, reads its lists, and stops it.
// The server gets an empty folder for its data.
func Adopt(ctx context.Context, o AdoptOptions) (*Adoption, error) {
	if err := CheckName(o.Name); err != nil {
		return nil, err
	}
	if !o.NoSandbox {
		if err := sandbox.Available(); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(o.Timeout, AdoptTimeout))
	defer cancel()
	data, err := os.MkdirTemp("", "agentctl-adopt-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(data) }()
	home := filepath.Join(data, o.Name)
	if err := makeDataDir(home); err != nil {
		return nil, err
	}
	if o.User != nil {
		for _, dir := range []string{data, home} {
			if err := os.Chown(dir, int(o.User.Uid), int(o.User.Gid)); err != nil {
				return nil, err
			}
		}
	}
	pm := &PluginManifest{Name: o.Name, Version: "1.0.0", Command: o.Command, Env: o.Env, Sandbox: o.Sandbox}
	stderr := &tailBuffer{}
	c, err := startServer(ctx, o, pm, home, stderr)
	if err != nil {
		return nil, &AdoptError{err, stderr.String()}
	}
	defer c.close()
	a := &Adoption{Manifest: pm, Protocol: c.server.ProtocolVersion, Server: oneLine(c.server.ServerInfo.Name+" "+c.server.ServerInfo.Version, 80)}
	if v := c.server.ServerInfo.Version; len(v) <= 64 && kernel.IsVersion(v) {
		pm.Version = v
	}
	if err := a.readServer(ctx, c); err != nil {
		c.close() // stderr is complete then
		return nil, &AdoptError{c.explain(ctx, err), stderr.String()}
	}
	if a.JSON, err = marshalManifest(pm); err != nil {
		return nil, err
	}
	if _, _, err := parse(a.JSON); err != nil {
		return nil, err
	}
	return a, nil
}

// startServer starts the server and makes the handshake.
func startServer(ctx context.Context, o AdoptOptions, pm *PluginManifest, home string, stderr *tailBuffer) (*conn, error) {
	prog, err := findProgram(o.Folder, home, pm)
	if err != nil {
		return nil, err
	}
	// This Host runs nothing: only its method policy is needed.
	h := &Host{o: Options{Private: o.Private}}
	ch := &child{name: o.Name, dir: o.Folder, program: prog, data: home, sandbox: !o.NoSandbox, user: o.User, stderr: stderr}
	if ch.policy, err = h.policy(o.Folder, home, o.Sandbox); err != nil {
		return nil, err
	}
	line, err := ch.dial(zap.NewNop())(ctx)
	if err != nil {
		return nil, err
	}
	p := newPlugin(source{manifest: &kernel.Manifest{Name: o.Name}, declared: pm}, newWatchSet(), o.Version, zap.NewNop())
	c := newConn(p, line)
	if err := c.initialize(ctx, o.Version); err != nil {
		c.close()
		return nil, c.explain(ctx, err)
	}
	return c, nil
}

// explain returns why a request to a server failed, after close: err, unless the connection ended.
func (c *conn) explain(ctx context.Context, err error) error {
	if c.fault != nil {
		return c.fault
	}
	if errors.Is(err, context.Canceled) && ctx.Err() == nil { // jrpc2 cancels what is in flight
		return errors.New("it ended before it answered")
	}
	return err
}

// readServer reads the lists of the server into the manifest, again while they change.
func (a *Adoption) readServer(ctx context.Context, c *conn) error {
	for {
		select {
		case <-c.listsChanged:
		case <-c.ended:
			return errors.New("it ended after the handshake")
		case <-ctx.Done():
			return fmt.Errorf("its lists did not come to rest: %w", ctx.Err())
		case <-time.After(listQuiet):
			return a.readLists(ctx, c)
		}
	}
}

// readLists reads all lists that the server announced.
func (a *Adoption) readLists(ctx context.Context, c *conn) error {
	caps, m := c.server.Capabilities, a.Manifest
	m.Capabilities = []string{m.Name + ".read"}
	for _, l := range []struct {
		has          bool
		method, list string
		add          func(json.RawMessage)
	}{
		{caps.Tools != nil, "tools/list", "tools", a.addTool},
		{caps.Resources != nil, "resources/list", "resources", func(raw json.RawMessage) { a.addResource(raw, caps.Resources.Subscribe) }},
		{caps.Resources != nil, methodTemplates, "resourceTemplates", a.addTemplate},
		{caps.Prompts != nil, methodPrompts, "prompts", a.addPrompt},
	} {
		if !l.has {
			continue
		}
		items, ignored, err := c.listCounting(ctx, l.method, l.list)
		var rpc *jrpc2.Error
		if errors.As(err, &rpc) && rpc.Code == jrpc2.MethodNotFound { // announced for another list
			continue
		} else if err != nil {
			return err
		}
		if l.list == "tools" {
			items = a.withoutCollisions(items)
		}
		for _, raw := range items {
			l.add(raw)
		}
		if ignored > 0 {
			a.leaveOut(fmt.Sprintf("%d more of %s", ignored, l.list), fmt.Sprintf("a plugin has at most %d", kernel.MaxToolsPerPlugin))
		}
	}
	m.FollowResources = caps.Resources != nil
	if len(m.Tools)+len(m.Resources)+len(m.ResourceTemplates)+len(m.Prompts) == 0 {
		return errors.New("it has no tools, resources or prompts that the relay could offer")
	}
	return nil
}

// leaveOut notes why something is not in the manifest.
func (a *Adoption) leaveOut(name, reason string) {
	a.LeftOut = append(a.LeftOut, LeftOut{oneLine(name, 64), reason})
}

// withoutCollisions leaves out tools whose public names are the same, all of them: otherwise the order of
// the server's list would decide which one a client reaches.
func (a *Adoption) withoutCollisions(items []json.RawMessage) (kept []json.RawMessage) {
	count := make(map[string]int)
	for _, raw := range items {
		count[PublicName(a.Manifest.Name, nameOf(raw, "name"))]++
	}
	for _, raw := range items {
		if name := nameOf(raw, "name"); count[PublicName(a.Manifest.Name, name)] > 1 {
			a.leaveOut(name, "another tool of the server would have the same name, "+PublicName(a.Manifest.Name, name))
			a.ignore(name)
			continue
		}
		kept = append(kept, raw)
	}
	return kept
}

// ignore notes a tool that is left out on purpose, so that it is not reported as new later.
func (a *Adoption) ignore(name string) {
	if canBeDeclared(name) && !slices.Contains(a.Manifest.Ignored, name) {
		a.Manifest.Ignored = append(a.Manifest.Ignored, name)
	}
}

// canBeDeclared reports whether a manifest can have a tool of this name.
func canBeDeclared(name string) bool { return name != "" && name == oneLine(name, 128) }

// addTool adds a tool of the server, or says why not. A tool of which nobody knows that it only
// reads needs the scope to write.
func (a *Adoption) addTool(raw json.RawMessage) {
	var t struct {
		Name         string                       `json:"name"`
		Title        string                       `json:"title"`
		Description  string                       `json:"description"`
		InputSchema  json.RawMessage              `json:"inputSchema"`
		OutputSchema json.RawMessage              `json:"outputSchema"`
		Annotations  *toolAnnotations             `json:"annotations"`
		Execution    struct{ TaskSupport string } `json:"execution"`
	}
	m := a.Manifest
	err := json.Unmarshal(raw, &t)
	if err == nil && t.Execution.TaskSupport == "required" {
		err = errors.New("it runs as a task, which the relay does not offer")
	}
	d := DeclaredTool{
		Name: PublicName(m.Name, t.Name), Title: oneLine(t.Title, 128), Description: plainText(t.Description, "The tool "+t.Name+" of the MCP server "+m.Name+"."),
		InputSchema: t.InputSchema, OutputSchema: t.OutputSchema, ServerName: t.Name, Digest: toolDigest(raw),
	}
	scope := m.Name + ".write"
	if t.Annotations != nil {
		d.Annotations = &t.Annotations.DeclaredAnnotations
		d.Title = cmp.Or(d.Title, oneLine(t.Annotations.Title, 128))
		if ro := d.Annotations.ReadOnly; ro != nil && *ro {
			scope = m.Name + ".read"
		}
	}
	d.Capability = scope
	if err == nil {
		err = checkPart(&PluginManifest{Name: m.Name, Version: "1.0.0", Capabilities: []string{scope}, Tools: []DeclaredTool{d}})
	}
	if err != nil {
		a.leaveOut(t.Name, firstProblem(err))
		a.ignore(t.Name)
		return
	}
	if !slices.Contains(m.Capabilities, scope) {
		m.Capabilities = append(m.Capabilities, scope)
	}
	m.Tools = append(m.Tools, d)
}

// toolAnnotations are ToolAnnotations of MCP.
type toolAnnotations struct {
	Title string `json:"title"`
	DeclaredAnnotations
}

// addResource adds a resource of the server, or says why not.
func (a *Adoption) addResource(raw json.RawMessage, canSubscribe bool) {
	var r struct {
		URI, Name, Description string
		MIMEType               string `json:"mimeType"`
	}
	m := a.Manifest
	if json.Unmarshal(raw, &r) != nil || r.URI == "" {
		return
	}
	d := DeclaredResource{URI: publicURI(m.Name, r.URI), Name: oneLine(r.Name, 128), Description: plainText(r.Description, "A resource of the MCP server "+m.Name+"."),
		MIMEType: mediaTypeOf(r.MIMEType), Subscribable: canSubscribe}
	if err := checkPart(&PluginManifest{Name: m.Name, Version: "1.0.0", Resources: []DeclaredResource{d}}); err != nil {
		a.leaveOut(r.URI, firstProblem(err))
	} else if !slices.ContainsFunc(m.Resources, func(o DeclaredResource) bool { return o.URI == d.URI }) {
		m.Resources = append(m.Resources, d)
	}
}

// mediaTypeOf returns a MIME type of a server if a manifest may have it, else that of unknown bytes,
// which are shown as text if they are.
func mediaTypeOf(s string) string {
	if len(s) <= 128 && mediaType.MatchString(s) {
		return s
	}
	return "text/plain"
}

// addTemplate adds a resource template of the server, or says why not.
func (a *Adoption) addTemplate(raw json.RawMessage) {
	var r struct {
		Template    string `json:"uriTemplate"`
		Name        string `json:"name"`
		Description string `json:"description"`
		MIMEType    string `json:"mimeType"`
	}
	m := a.Manifest
	if json.Unmarshal(raw, &r) != nil || r.Template == "" {
		return
	}
	d := DeclaredTemplate{URITemplate: publicURI(m.Name, r.Template), Name: cmp.Or(oneLine(r.Name, 128), "template"),
		Description: plainText(r.Description, "A resource template of the MCP server "+m.Name+"."), MIMEType: r.MIMEType}
	if d.MIMEType != "" {
		d.MIMEType = mediaTypeOf(d.MIMEType)
	}
	if err := checkPart(&PluginManifest{Name: m.Name, Version: "1.0.0", ResourceTemplates: []DeclaredTemplate{d}}); err != nil || len(m.ResourceTemplates) >= 64 {
		a.leaveOut(r.Template, firstProblem(err))
		return
	}
	m.ResourceTemplates = append(m.ResourceTemplates, d)
}

// addPrompt adds a prompt of the server, or says why not.
func (a *Adoption) addPrompt(raw json.RawMessage) {
	var r struct {
		Name, Title, Description string
		Arguments                []DeclaredArgument
	}
	m := a.Manifest
	if json.Unmarshal(raw, &r) != nil {
		return
	}
	d := DeclaredPrompt{Name: PublicName(m.Name, r.Name), Title: oneLine(r.Title, 128), ServerName: r.Name,
		Description: plainText(r.Description, "A prompt of the MCP server "+m.Name+"."), Arguments: r.Arguments}
	for i := range d.Arguments {
		if text := &d.Arguments[i].Description; *text != "" {
			*text = plainText(*text, "-")
		}
	}
	err := checkPart(&PluginManifest{Name: m.Name, Version: "1.0.0", Prompts: []DeclaredPrompt{d}})
	if err == nil && slices.ContainsFunc(m.Prompts, func(o DeclaredPrompt) bool { return o.Name == d.Name }) {
		err = errors.New("another prompt of the server has the same name")
	}
	if err != nil {
		a.leaveOut(r.Name, firstProblem(err))
		return
	}
	m.Prompts = append(m.Prompts, d)
}

// checkPart checks a manifest that has one part of the one that is made.
func checkPart(m *PluginManifest) error {
	raw, err := marshalManifest(m)
	if err == nil {
		_, _, err = parse(raw)
	}
	return err
}

// firstProblem is a line that says what is wrong with a part.
func firstProblem(err error) string {
	var e *ManifestError
	switch {
	case err == nil:
		return "there are too many"
	case errors.As(err, &e) && len(e.Problems) > 0:
		return oneLine(e.Problems[0].Where+": "+e.Problems[0].What, 200)
	}
	return oneLine(err.Error(), 200)
}

// marshalManifest is the content of a plugin.json: two spaces, no escapes of < and >.
func marshalManifest(m *PluginManifest) ([]byte, error) {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(m); err != nil {
		return nil, err
	}
	return []byte(b.String()), nil
}

// PublicName is the name that clients know for a tool or prompt of an adopted server: NAME. and the
// server's own name, in which characters other than A-Z, a-z, 0-9, _ and - become _. A name that is
// too long is cut and ends with eight digits of its hash.
func PublicName(plugin, name string) string {
	mapped := strings.Map(func(r rune) rune {
		if r < unicode.MaxASCII && (unicode.IsLetter(r) || unicode.IsDigit(r) || r == '_' || r == '-') {
			return r
		}
		return '_'
	}, name)
	if keep := manifest.MaxToolNameLen - len(plugin) - 1; len(mapped) > keep {
		sum := sha256.Sum256([]byte(name))
		mapped = mapped[:keep-9] + "_" + hex.EncodeToString(sum[:4])
	}
	return plugin + "." + mapped
}
