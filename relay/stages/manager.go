package stages

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/pipeline"
)

// Options configure a Manager. All fields may be left empty.
type Options struct {
	// Log receives the lines of the trace stage; nil: none.
	Log *zap.Logger
	// LogFilter is kept up to date with the enabled redact stages; nil: the lines of the trace stage alone
	// are cleaned.
	LogFilter *LogFilter
	// KeyDir is the directory of the keys of sign. Without it sign cannot be enabled.
	KeyDir string
	// OnChange is called after each change of the list, by the goroutine that made it.
	OnChange func()
	// OnListChange is called like OnChange, after a change of what the lists of tools, resources and
	// prompts have: rules of acl, or whether compress is enabled.
	OnListChange func()
}

// Middleware is one entry of the list. It is an alias of a plain struct, so that the
// control plane, which does not import this package, has the same type.
type Middleware = struct {
	Name    string          `json:"name"`
	Scope   string          `json:"scope"`
	Enabled bool            `json:"enabled"`
	Config  json.RawMessage `json:"config"`
}

// Manager keeps the list of stages of one pipeline and changes it at run time. Each change
// copies the list, checks the copy and swaps it in one step; a change that is refused
// changes nothing. Errors are *manifest.Error and may be shown to the caller.
type Manager struct {
	pipe *pipeline.Pipeline[*kernel.Request, *kernel.Result]
	env  env
	mu   sync.Mutex // protects rows; OnChange is called without it
	// rows are in the order of the list, the outermost stage first. A change works on a copy, since the
	// present rows stay in force if it is refused.
	rows []row
	// listed are the entries that decide about lists, as JSON. mu protects it.
	listed string
}

// row is a stage with its scopes. lines[0] is the global one.
type row struct {
	kind  *kind
	lines []line
}

// line is a stage in one scope. The first line of a stage is global; others override it for the
// requests in their scope.
type line struct {
	scope     pipeline.Scope
	enabled   bool
	hasConfig bool  // it has a configuration; otherwise it uses the global line's
	stage     stage // nil: not configured, or the global line's
}

func (r *row) isNamed(name string) bool { return r.kind.name == name }

// New puts the default list into force: trace and metrics are enabled, the others not.
func New(p *pipeline.Pipeline[*kernel.Request, *kernel.Result], opt Options) (*Manager, error) {
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	if opt.LogFilter == nil {
		opt.LogFilter = new(LogFilter)
	}
	m := &Manager{pipe: p, env: env{opt: opt}}
	rows := make([]row, len(kinds))
	for i, k := range kinds {
		rows[i] = row{k, []line{{enabled: k.isOn}}}
		if st, err := k.make(&m.env, nil); err == nil { // an error: sign has no default key
			rows[i].lines[0].stage = st
		}
	}
	if err := m.swap(rows); err != nil {
		return nil, err
	}
	return m, nil
}

// Metrics returns the counters of the metrics stage.
func (m *Manager) Metrics() *Metrics { return &m.env.metrics }

// List returns the list, outermost stage first; of each stage the global line first, then
// the narrower ones. It takes no lock.
func (m *Manager) List() []Middleware {
	var out []Middleware
	for _, e := range m.pipe.Entries() {
		out = append(out, Middleware{Name: e.Stage.Name, Scope: e.Scope.String(), Enabled: e.Enabled, Config: e.Config})
	}
	return out
}

// Enable switches a stage on for a scope ("global", "transport=http", "plugin=tickets",
// "connection=ID").
func (m *Manager) Enable(name, scope string) error { return m.setEnabled(name, scope, true) }

// Disable switches a stage off for a scope. A scope other than global may also lose its
// configuration: its line is removed when it no longer changes anything (see prune).
func (m *Manager) Disable(name, scope string) error { return m.setEnabled(name, scope, false) }

// setEnabled is Enable and Disable.
func (m *Manager) setEnabled(name, scope string, isOn bool) error {
	return m.edit(name, scope, func(_ *row, l *line) error {
		l.enabled = isOn
		if !isOn && l.scope.Kind != pipeline.Global {
			l.stage, l.hasConfig = nil, false
		}
		return nil
	})
}

// Configure replaces the configuration of a stage for a scope, a strict JSON object. Lines
// without a configuration use the global line's. It does not enable or disable the stage.
func (m *Manager) Configure(name, scope string, config []byte) error {
	if len(config) > MaxConfig {
		return invalid(name, fmt.Sprintf("a configuration has at most %d bytes", MaxConfig))
	}
	return m.edit(name, scope, func(r *row, l *line) error {
		st, err := r.kind.make(&m.env, config)
		if err != nil {
			return err
		}
		l.stage, l.hasConfig = st, true
		return nil
	})
}

// Reorder puts the stages into another order, outermost first. It names each stage once.
func (m *Manager) Reorder(names []string) error {
	return m.change(func(rows []row) ([]row, error) {
		var out []row
		for _, name := range names {
			i := slices.IndexFunc(rows, func(r row) bool { return r.isNamed(name) })
			if i >= 0 && !slices.ContainsFunc(out, func(r row) bool { return r.isNamed(name) }) {
				out = append(out, rows[i])
			}
		}
		if len(out) != len(rows) || len(names) != len(rows) {
			return nil, invalid("order", "each of "+kindNames()+" once")
		}
		return out, nil
	})
}

// Forget drops the lines of a scope that has ended, such as that of a closed connection.
// Most connections have none, and then the list is not changed.
func (m *Manager) Forget(scope pipeline.Scope) {
	isScope := func(l line) bool { return l.scope == scope }
	m.mu.Lock()
	isUsed := slices.ContainsFunc(m.rows, func(r row) bool { return slices.ContainsFunc(r.lines, isScope) })
	m.mu.Unlock()
	if scope.Kind == pipeline.Global || !isUsed {
		return
	}
	_ = m.change(func(rows []row) ([]row, error) {
		for i := range rows {
			rows[i].lines = slices.DeleteFunc(rows[i].lines, isScope)
		}
		return rows, nil
	})
}

// edit changes one line, which it adds if the scope has none, and drops the lines that
// are not needed any more.
func (m *Manager) edit(name, scope string, fn func(*row, *line) error) error {
	s, err := pipeline.ParseScope(scope)
	if err != nil {
		return invalid("scope", err.Error())
	}
	return m.change(func(rows []row) ([]row, error) {
		i := slices.IndexFunc(rows, func(r row) bool { return r.isNamed(name) })
		if i < 0 {
			return nil, &manifest.Error{Code: manifest.BadRequest, Message: "no stage has this name; the stages are " + kindNames(), Reason: "stage"}
		}
		r := &rows[i]
		j := slices.IndexFunc(r.lines, func(l line) bool { return l.scope == s })
		if j < 0 {
			// lines[0] is global, so ">" allows MaxScoped others.
			if len(r.lines) > pipeline.MaxScoped {
				return nil, invalid("scope", fmt.Sprintf("%s has %d scopes already; give one of them the state of the global line first", name, pipeline.MaxScoped))
			}
			j = len(r.lines)
			r.lines = append(r.lines, line{scope: s, enabled: r.lines[0].enabled})
		}
		if err := fn(r, &r.lines[j]); err != nil {
			return nil, err
		}
		r.prune()
		return rows, nil
	})
}

// prune drops the lines that change nothing: every wider line has the same state, and no
// wider line but the global one has a configuration.
func (r *row) prune() {
	r.lines = slices.DeleteFunc(slices.Clone(r.lines), func(l line) bool {
		return l.scope.Kind != pipeline.Global && !l.hasConfig && !slices.ContainsFunc(r.lines, func(w line) bool {
			return w.scope.Kind < l.scope.Kind && (w.enabled != l.enabled || w.scope.Kind != pipeline.Global && w.hasConfig)
		})
	})
}

// change applies fn to a copy of the rows and puts the result into force. OnChange runs after
// mu was released, so that it may call the Manager again.
func (m *Manager) change(fn func([]row) ([]row, error)) error {
	listsChanged, err := m.applyChange(fn)
	if err != nil {
		return err
	}
	if m.env.opt.OnChange != nil {
		m.env.opt.OnChange()
	}
	if listsChanged && m.env.opt.OnListChange != nil {
		m.env.opt.OnListChange()
	}
	return nil
}

// applyChange is change without the callbacks. It takes mu itself.
func (m *Manager) applyChange(fn func([]row) ([]row, error)) (listsChanged bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	rows := slices.Clone(m.rows)
	for i := range rows {
		rows[i].lines = slices.Clone(rows[i].lines)
	}
	if rows, err = fn(rows); err != nil {
		return false, err
	}
	before := m.listed
	err = m.swap(rows)
	return m.listed != before, err
}

// swap puts the rows into force. m.mu is held, or no other goroutine has m yet.
//
// The pipeline checks the order and swaps all entries in one step. Requests in progress end
// with the stages that they began with. After an error the former rows are still in force.
func (m *Manager) swap(rows []row) error {
	var entries []pipeline.Entry[*kernel.Request, *kernel.Result]
	var redactors []*redactor
	var listed []Middleware
	for _, r := range rows {
		for _, l := range r.lines {
			// Looked up at each swap, so that a scope without a configuration gets changes of the
			// global one.
			st := l.stage
			if !l.hasConfig {
				st = r.lines[0].stage
			}
			e := pipeline.Entry[*kernel.Request, *kernel.Result]{
				Stage: kernel.Stage{Name: r.kind.name, OuterTo: r.kind.outerTo, Wrap: pass},
				Scope: l.scope, Enabled: l.enabled, Config: json.RawMessage("{}"), Match: matcher(r.kind, l.scope),
			}
			switch {
			case st != nil:
				e.Stage.Wrap, e.Config = st.wrap, encode(st.config())
			case l.enabled:
				return invalid(r.kind.name, "configure it first: it has no default")
			}
			if ref, ok := st.(refuser); ok {
				e.Stage.Refuses = ref.refuses
			}
			if f, ok := st.(filterer); ok {
				e.Stage.Filter = f.filter
			}
			if r.kind.decidesLists && (l.enabled || l.scope.Kind != pipeline.Global) {
				listed = append(listed, Middleware{r.kind.name, l.scope.String(), l.enabled, e.Config})
			}
			if red, ok := st.(*redactor); ok && l.enabled && !slices.Contains(redactors, red) {
				redactors = append(redactors, red)
			}
			entries = append(entries, e)
		}
	}
	if err := m.pipe.SwapEntries(entries...); err != nil {
		return invalid("order", err.Error())
	}
	m.rows, m.listed = rows, string(encode(listed))
	m.env.opt.LogFilter.redactors.Store(&redactors)
	return nil
}

// pass is the Wrap function of a stage that is not configured, and so not enabled.
func pass(next kernel.Handler) kernel.Handler { return next }

// kindNames lists the stages for messages, in their default order.
func kindNames() string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.name
	}
	return strings.Join(names, ", ")
}
