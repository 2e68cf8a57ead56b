package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"

	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
)

// Reloaded is what became of one source at a reload.
type Reloaded struct {
	Source string // a file, or what it holds
	Err    error  // nil: it is in force; else what was there before stays in force
}

// Reload reads again what may change while the relay serves: the certificate of Options.TLSCert,
// the origins of Options.AllowOriginFile, the gateway's tokens and origins, and the external plugins
// whose manifest or program has changed. A source that is invalid is left as it was and does not keep
// the others from being applied. It is called by one goroutine, after Open.
//
// Tokens, keys and revocations of the state directory need no reload: Run follows them. What else an
// option decides needs a restart.
func (r *Relay) Reload() (list []Reloaded) {
	if r.certificate != nil {
		list = append(list, Reloaded{r.opt.TLSCert, r.certificate.Reload()})
	}
	if r.opt.AllowOriginFile != "" {
		err := r.readOrigins()
		if err == nil {
			for _, g := range r.guards {
				g.SetOrigins(r.origins())
			}
		}
		list = append(list, Reloaded{r.opt.AllowOriginFile, err})
	}
	if r.gateway != nil && r.opt.ReadSSE != nil {
		access, err := r.opt.ReadSSE()
		if err == nil {
			access.AllowOrigins = append(slices.Clone(access.AllowOrigins), r.origins()...)
			err = r.gateway.SetAccess(access)
		}
		list = append(list, Reloaded{"the event gateway's tokens and origins", err})
	}
	for _, p := range r.processes.ReloadChanged(context.Background()) { // bounded by the time that a plugin has to start
		list = append(list, Reloaded{"plugin " + p.Name, p.Err})
		if p.Err == nil {
			r.logPluginChange("reload", p.Name, "")
		}
	}
	return list
}

// logPluginChange offers the event of a change that the relay made by itself, and informs those who
// watch the list of plugins.
func (r *Relay) logPluginChange(action, name, reason string) {
	payload, err := json.Marshal(control.Change{Action: action, Name: name, Reason: reason, Actor: control.ActorRelay})
	if err != nil {
		return // strings are always JSON
	}
	r.queue.Offer(kernel.Event{Type: control.EventPlugin, Aggregate: name, Payload: payload})
	r.control.PluginsChanged()
}

// origins are those of pages that may call.
func (r *Relay) origins() []string { return slices.Concat(r.opt.AllowOrigin, r.fileOrigins) }

// readOrigins reads Options.AllowOriginFile, and changes nothing if that fails.
func (r *Relay) readOrigins() error {
	if r.opt.AllowOriginFile == "" {
		return nil
	}
	list, err := ReadOrigins(r.opt.AllowOriginFile)
	if err != nil {
		return &OptionError{"AllowOriginFile", err}
	}
	r.fileOrigins = list
	return nil
}

// maxOriginFile bounds a file of origins, in bytes.
const maxOriginFile = 64 << 10

// ReadOrigins reads a file of web origins, one a line; # begins a comment.
func ReadOrigins(path string) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxOriginFile+1))
	switch {
	case err != nil:
		return nil, err
	case len(b) > maxOriginFile:
		return nil, fmt.Errorf("%s is larger than 64 KiB", path)
	}
	var list []string
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if err := checkOrigin(line); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", path, n, err)
		}
		list = append(list, line)
	}
	return list, nil
}

var errOrigin = errors.New("an origin is https://HOST[:PORT]")

func checkOrigin(s string) error {
	if u, err := url.Parse(s); err != nil || u.Scheme == "" || u.Host == "" || u.Path != "" {
		return fmt.Errorf("%w, not %q", errOrigin, s)
	}
	return nil
}
