package stages

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/pipeline"
)

// Options configure a Manager. All fields may be left empty.
type Options struct {
	Log      *zap.Logger // of the trace stage
	KeyDir   string      // directory of the keys of sign; "" and sign cannot be enabled
	OnChange func()      // called after each change of the list, from the goroutine that made it
}

// Middleware is one line of the list. (An alias of a plain struct, so that the control
// plane, which may not import this room, makes the same type.)
type Middleware = struct {
	Name    string          `json:"name"`
	Scope   string          `json:"scope"`
	Enabled bool            `json:"enabled"`
	Config  json.RawMessage `json:"config"`
}

// Manager keeps the list of stages of one pipeline and changes it at run time. Each
// change makes a whole new list, checks it and swaps it in one step; a change that is
// refused changes nothing. Errors are *manifest.Error and may be told to the caller.
type Manager struct {
	pipe *pipeline.Pipeline[*kernel.Request, *kernel.Result]
	env  env
	logs atomic.Pointer[[]*redactor] // what takes secrets out of log lines

	mu   sync.Mutex // protects rows
	rows []row      // in the order of the list; replaced, never changed
}

// row is a stage with its scopes; lines[0] is the global one.
type row struct {
	kind  *kind
	lines []line
}

type line struct {
	scope   pipeline.Scope
	enabled bool
	own     bool  // has a configuration of its own; otherwise it is the global line's
	stage   stage // nil: not configured, or the global line's
}

// New puts the default list into force: trace and metrics enabled, the rest not.
func New(p *pipeline.Pipeline[*kernel.Request, *kernel.Result], opt Options) (*Manager, error) {
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	m := &Manager{pipe: p, env: env{opt: opt}}
	m.env.scrub = m.scrub
	rows := make([]row, len(kinds))
	for i, k := range kinds {
		rows[i] = row{k, []line{{enabled: k.on}}}
		if st, err := k.make(&m.env, nil); err == nil { // sign has no default key
			rows[i].lines[0].stage = st
		}
	}
	if err := m.swap(rows); err != nil {
		return nil, err
	}
	return m, nil
}

// Metrics gives what the metrics stage counts.
func (m *Manager) Metrics() *Metrics { return &m.env.metrics }

// List shows the list, outermost stage first; under each the global line, then the
// narrower ones. It takes no lock.
func (m *Manager) List() []Middleware {
	var out []Middleware
	for _, e := range m.pipe.Entries() {
		out = append(out, Middleware{Name: e.Stage.Name, Scope: e.Scope.String(), Enabled: e.Enabled, Config: e.Config})
	}
	return out
}

// Enable switches a stage on for a scope ("global", "transport=http", "plugin=tickets",
// "connection=ID").
func (m *Manager) Enable(name, scope string) error { return m.turn(name, scope, true) }

// Disable switches a stage off for a scope. A scope other than global loses its own
// configuration, and with it its line when wider ones are off too: how else would one go?
func (m *Manager) Disable(name, scope string) error { return m.turn(name, scope, false) }

func (m *Manager) turn(name, scope string, on bool) error {
	return m.edit(name, scope, func(_ *row, l *line) error {
		l.enabled = on
		if !on && l.scope.Kind != pipeline.Global {
			l.stage, l.own = nil, false
		}
		return nil
	})
}

// Configure gives a stage another configuration for a scope, a strict JSON object. The
// lines without one of their own follow the global one. It does not switch anything on
// or off.
func (m *Manager) Configure(name, scope string, config []byte) error {
	if len(config) > MaxConfig {
		return wrong(name, fmt.Sprintf("a configuration has at most %d bytes", MaxConfig))
	}
	return m.edit(name, scope, func(r *row, l *line) error {
		st, err := r.kind.make(&m.env, config)
		if err != nil {
			return err
		}
		l.stage, l.own = st, true
		return nil
	})
}

// Reorder puts the stages into another order, outermost first; it names each once.
func (m *Manager) Reorder(names []string) error {
	return m.change(func(rows []row) ([]row, error) {
		var out []row
		for _, n := range names {
			i := slices.IndexFunc(rows, func(r row) bool { return r.kind.name == n })
			if i < 0 || slices.ContainsFunc(out, func(r row) bool { return r.kind.name == n }) {
				return nil, wrong("order", "each of "+known()+" once")
			}
			out = append(out, rows[i])
		}
		if len(out) != len(rows) {
			return nil, wrong("order", "each of "+known()+" once")
		}
		return out, nil
	})
}

// Forget drops every line of a scope that is gone, such as that of an ended connection.
func (m *Manager) Forget(scope pipeline.Scope) {
	none := func() bool { // as most connections have
		m.mu.Lock()
		defer m.mu.Unlock()
		return !slices.ContainsFunc(m.rows, func(r row) bool {
			return slices.ContainsFunc(r.lines, func(l line) bool { return l.scope == scope })
		})
	}
	if scope.Kind == pipeline.Global || none() {
		return
	}
	_ = m.change(func(rows []row) ([]row, error) {
		for i := range rows {
			rows[i].lines = slices.DeleteFunc(rows[i].lines, func(l line) bool { return l.scope == scope })
		}
		return rows, nil
	})
}

// edit changes one line, which it makes when the scope has none.
func (m *Manager) edit(name, scope string, fn func(*row, *line) error) error {
	s, err := pipeline.ParseScope(scope)
	if err != nil {
		return wrong("scope", err.Error())
	}
	return m.change(func(rows []row) ([]row, error) {
		i := slices.IndexFunc(rows, func(r row) bool { return r.kind.name == name })
		if i < 0 {
			return nil, &manifest.Error{Code: manifest.BadRequest, Message: "no stage has this name; the stages are " + known(), Reason: "stage"}
		}
		r := &rows[i]
		j := slices.IndexFunc(r.lines, func(l line) bool { return l.scope == s })
		if j < 0 {
			if len(r.lines) > pipeline.MaxScoped {
				return nil, wrong("scope", fmt.Sprintf("%s has %d scopes already; give one of them the state of the global line first", name, pipeline.MaxScoped))
			}
			j = len(r.lines)
			r.lines = append(r.lines, line{scope: s, enabled: r.lines[0].enabled})
		}
		if err := fn(r, &r.lines[j]); err != nil {
			return nil, err
		}
		r.tidy()
		return rows, nil
	})
}

// tidy drops the lines that say what every wider line says.
func (r *row) tidy() {
	r.lines = slices.DeleteFunc(slices.Clone(r.lines), func(l line) bool {
		return l.scope.Kind != pipeline.Global && !l.own && !slices.ContainsFunc(r.lines, func(w line) bool {
			return w.scope.Kind < l.scope.Kind && (w.enabled != l.enabled || w.scope.Kind != pipeline.Global && w.own)
		})
	})
}

// change applies fn to a copy of the rows and puts the outcome into force.
func (m *Manager) change(fn func([]row) ([]row, error)) error {
	if err := m.changeLocked(fn); err != nil {
		return err
	}
	if m.env.opt.OnChange != nil {
		m.env.opt.OnChange()
	}
	return nil
}

func (m *Manager) changeLocked(fn func([]row) ([]row, error)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	rows := slices.Clone(m.rows)
	for i := range rows {
		rows[i].lines = slices.Clone(rows[i].lines)
	}
	rows, err := fn(rows)
	if err != nil {
		return err
	}
	return m.swap(rows)
}

// swap puts the rows into force. m.mu is held, or nobody else has m yet.
func (m *Manager) swap(rows []row) error {
	var entries []pipeline.Entry[*kernel.Request, *kernel.Result]
	var logs []*redactor
	for _, r := range rows {
		for _, l := range r.lines {
			st := l.stage
			if !l.own {
				st = r.lines[0].stage
			}
			e := pipeline.Entry[*kernel.Request, *kernel.Result]{
				Stage: kernel.Stage{Name: r.kind.name, OuterTo: r.kind.outside, Wrap: pass},
				Scope: l.scope, Enabled: l.enabled, Config: json.RawMessage("{}"), Match: matcher(r.kind, l.scope),
			}
			switch {
			case st != nil:
				e.Stage.Wrap, e.Config = st.wrap, encode(st.config())
			case l.enabled:
				return wrong(r.kind.name, "configure it first: it has no default")
			}
			if red, ok := st.(*redactor); ok && l.enabled && !slices.Contains(logs, red) {
				logs = append(logs, red)
			}
			entries = append(entries, e)
		}
	}
	if err := m.pipe.SwapEntries(entries...); err != nil {
		return wrong("order", err.Error())
	}
	m.rows = rows
	m.logs.Store(&logs)
	return nil
}

func pass(next kernel.Handler) kernel.Handler { return next }

// scrub takes the secrets of every enabled redact stage, whatever its scope, out of a
// log field.
func (m *Manager) scrub(s string) string {
	if logs := m.logs.Load(); logs != nil {
		for _, r := range *logs {
			s = r.clean(s)
		}
	}
	return s
}

func known() string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.name
	}
	return strings.Join(names, ", ")
}
