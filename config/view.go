package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
)

// View is a configuration by the names of its keys, such as history.flush. Its values are those of
// Plain, or what JSON makes of them.
type View struct {
	Files   []string          `json:"files"`
	Values  map[string]any    `json:"values"` // as Plain returns them
	Origins map[string]string `json:"origins"`
	Error   string            `json:"error,omitempty"`          // why the present files are not in force
	Restart []string          `json:"restart_needed,omitempty"` // keys whose change waits for a restart
	Notes   []string          `json:"notes,omitempty"`
}

// View is the configuration as it was loaded.
//
// Error and Restart are empty: only the daemon knows them.
func (c *Config) View() View {
	v := View{Files: c.Files, Values: map[string]any{}, Origins: map[string]string{}, Notes: c.Notes}
	for name, s := range c.Settings {
		v.Values[name], v.Origins[name] = Plain(s.Value), s.Origin
	}
	return v
}

// NestedView is a View whose keys are those of a file: history.flush is flush in the object history.
// It is the answer to get_config on the control socket, where each key is snake_case.
type NestedView struct {
	Files   []string       `json:"files"`
	Values  map[string]any `json:"values"`
	Origins map[string]any `json:"origins"`
	Error   string         `json:"error,omitempty"`
	Restart []string       `json:"restart_needed,omitempty"`
	Notes   []string       `json:"notes,omitempty"`
}

// Nested returns the view as get_config answers it.
func (v View) Nested() NestedView {
	origins := map[string]any{}
	for name, origin := range v.Origins {
		origins[name] = origin
	}
	return NestedView{v.Files, Nest(v.Values), Nest(origins), v.Error, v.Restart, v.Notes}
}

// UnmarshalJSON decodes a NestedView. A daemon of an older version nests nothing, which this
// accepts too.
func (v *View) UnmarshalJSON(b []byte) error {
	var n NestedView
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	*v = View{Files: n.Files, Values: flatten(n.Values), Origins: map[string]string{}, Error: n.Error, Restart: n.Restart, Notes: n.Notes}
	for name, origin := range flatten(n.Origins) {
		v.Origins[name], _ = origin.(string)
	}
	return nil
}

// flatten is the inverse of Nest.
func flatten(nested map[string]any) map[string]any {
	out := map[string]any{}
	for name, v := range nested {
		group, ok := v.(map[string]any)
		if !ok {
			out[name] = v
		}
		for leaf, v := range group {
			out[name+"."+leaf] = v
		}
	}
	return out
}

// Text is the value of a key on one line, "-" for one that is left to its default.
//
// A key that this program lacks is shown as well: the daemon may be newer than the command.
func (v *View) Text(name string) string {
	k := FindKey(name)
	if k == nil { // of a newer daemon
		k = &Key{Name: name}
	}
	return k.Text(v.Values[name])
}

// Text is a value of the key on one line, "-" for one that is left to its default. The value
// is one of Plain, or what JSON makes of it, where numbers are whole: no key is a fraction.
func (k *Key) Text(v any) string {
	text := ""
	switch v := v.(type) {
	case nil:
	case []RuleText:
		text = fmt.Sprintf("%d rules", len(v))
	case []string:
		text = cmp.Or(strings.Join(v, ","), "none")
	case []any:
		words := make([]string, len(v))
		for i, w := range v {
			words[i] = fmt.Sprint(w)
		}
		text = cmp.Or(strings.Join(words, ","), "none")
		if k.Kind == KindRules {
			text = fmt.Sprintf("%d rules", len(v))
		}
	case float64:
		text = fmt.Sprint(int64(v))
	default:
		text = fmt.Sprint(v)
	}
	// An interval of 0 is not one that a file can name: it stands for the module's default.
	if text == "" || text == "0" && strings.HasPrefix(k.Name, "module_intervals.") {
		return "-"
	}
	return text
}

// GivenValues are the values nested as in a file, without those that are left to a default
// that no file can name. The empty relay and name stay, because a file may have them.
func (v *View) GivenValues() map[string]any {
	given := maps.Clone(v.Values)
	maps.DeleteFunc(given, func(name string, _ any) bool {
		return v.Text(name) == "-" && name != "relay" && name != "name"
	})
	return Nest(given)
}
