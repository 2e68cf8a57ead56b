package clientconfig

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// expr is a table header or a key with its value in a TOML file, with the lines it takes.
type expr struct {
	kind       unstable.Kind
	table, key []string // of the table it is in, and its own; of a header: table only
	start, end int      // offsets; whole lines
}

// scanTOML lists the expressions of a file in their order, with the lines that each takes. Comments and
// blank lines belong to none. It needs the parser: a string of several lines may have a line that looks like
// the header of a table, and an array may have a comment with a bracket.
func scanTOML(data []byte) ([]expr, error) {
	var p unstable.Parser
	p.Reset(data)
	var list []expr
	var table []string
	for p.NextExpression() {
		n := p.Expression()
		var path []string
		first, last := -1, 0 // where the key begins and ends
		for it := n.Key(); it.Next(); {
			k := it.Node()
			path = append(path, string(k.Data))
			if first < 0 {
				first = int(k.Raw.Offset)
			}
			last = int(k.Raw.Offset + k.Raw.Length)
		}
		e := expr{kind: n.Kind, start: bytes.LastIndexByte(data[:first], '\n') + 1}
		if n.Kind == unstable.KeyValue {
			e.table, e.key, last = table, path, int(n.Raw.Offset+n.Raw.Length)
		} else {
			table, e.table = path, path
		}
		e.end = len(data)
		if i := bytes.IndexByte(data[last:], '\n'); i >= 0 {
			e.end = last + i + 1
		}
		list = append(list, e)
	}
	return list, p.Error()
}

// tomlFile is a TOML file that is edited in place: lines are removed and added.
//
//	[mcp_servers.agentctl]          the header: the entry's lines are written right below it
//	command = "/old/agentctl"       a key of the entry: its lines are removed and written again
//	startup_timeout_sec = 30        a key that the user added: stays
//
//	[mcp_servers.agentctl.env]      a subtable: belongs to the entry, and removeTOML removes it too
//
// go-toml cannot write a syntax tree as it was read. Its package unstable reports where each expression
// is, which is enough for edits of whole lines.
type tomlFile struct {
	data   []byte
	before map[string]any // the content, to check the edit
	exprs  []expr
	eol    string   // "\n", or "\r\n" as in the file
	path   []string // of the entry
}

// parseTOML parses a file and refuses one whose entry is not in the form that edits of lines can handle.
// The file is parsed twice: toml.Unmarshal finds what is wrong with the meaning, such as a key that is given
// twice, and names the line; scanTOML finds the places.
func parseTOML(data []byte, container string) (*tomlFile, error) {
	f := &tomlFile{data: data, eol: "\n", path: []string{container, EntryName}}
	if bytes.Contains(data, []byte("\r\n")) {
		f.eol = "\r\n"
	}
	if bytes.HasPrefix(data, bom) {
		return nil, fmt.Errorf("%w: it begins with a byte order mark, which TOML does not allow", ErrSyntax)
	}
	if err := toml.Unmarshal(data, &f.before); err != nil {
		where := ""
		if at := new(toml.DecodeError); errors.As(err, &at) {
			line, column := at.Position()
			where = fmt.Sprintf(" (line %d, column %d)", line, column)
		}
		return nil, fmt.Errorf("%w: not TOML: %w%s", ErrSyntax, err, where)
	}
	var err error
	if f.exprs, err = scanTOML(data); err != nil {
		return nil, fmt.Errorf("%w: not TOML: %w", ErrSyntax, err)
	}
	// Only the documented form, a table [container.agentctl], can be edited by lines.
	for _, e := range f.exprs {
		full := append(slices.Clone(e.table), e.key...)
		inEntry := len(full) >= 2 && slices.Equal(full[:2], f.path)
		switch {
		case e.kind == unstable.ArrayTable && (full[0] == container && len(full) == 1 || inEntry && len(full) == 2),
			e.kind == unstable.KeyValue && len(full) == 1 && full[0] == container,
			e.kind == unstable.KeyValue && inEntry && len(e.table) < 2:
			// [[servers]] or [[servers.agentctl]]; servers = {…}; servers.agentctl.key = … or agentctl = {…}
			return nil, fmt.Errorf("%w: %s is not written as a table [%s]", ErrShape, EntryName, strings.Join(f.path, "."))
		}
	}
	return f, nil
}

// isEntry reports whether an expression belongs to the entry, its subtables included. It looks at the table
// only: parseTOML has refused entries that are written as a key.
func (f *tomlFile) isEntry(e expr) bool {
	return len(e.table) >= 2 && slices.Equal(e.table[:2], f.path)
}

// entryKey returns the key of the entry that an expression sets; "" for the header.
func (f *tomlFile) entryKey(e expr) string {
	if full := append(slices.Clone(e.table), e.key...); len(full) > 2 {
		return full[2]
	}
	return ""
}

// lines are the lines of an entry below its table header, each with a line end. Every field is one line, env
// as an inline table: a subtable would have to be below all other keys of the entry.
func (f *tomlFile) lines(entry []field) string {
	var b strings.Builder
	for _, e := range entry {
		b.WriteString(e.key + " = " + formatTOMLValue(e.value) + f.eol)
	}
	return b.String()
}

// formatTOMLValue writes a string, a []string, or a []EnvVar as an inline table: what entries of TOML
// files have. A name with other characters than those of a bare key is quoted; only a variable of the user
// can have such a name.
func formatTOMLValue(value any) string {
	switch v := value.(type) {
	case []string:
		items := make([]string, len(v))
		for i, s := range v {
			items[i] = quoteTOML(s)
		}
		return "[" + strings.Join(items, ", ") + "]"
	case []EnvVar:
		items := make([]string, len(v))
		for i, e := range v {
			name := e.Name
			if name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") != "" {
				name = quoteTOML(name)
			}
			items[i] = name + " = " + quoteTOML(e.Value)
		}
		return "{ " + strings.Join(items, ", ") + " }"
	}
	return quoteTOML(value.(string))
}

// quoteTOML returns a basic string, or a literal one for a text with backslashes, such as a path of Windows:
// a basic string would have each of them twice.
func quoteTOML(s string) string {
	isControl := func(r rune) bool { return r < ' ' || r == 0x7f }
	if strings.Contains(s, `\`) && !strings.ContainsAny(s, "'") && !strings.ContainsFunc(s, isControl) {
		return "'" + s + "'"
	}
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteString(`\` + string(r))
		case isControl(r):
			fmt.Fprintf(&b, `\u%04X`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String() + `"`
}

// setTOML is setJSON for TOML. It writes the lines of the entry right below the header of its table, and
// leaves out the old lines of the same keys and of owned ones. Without such a table it appends one.
func setTOML(data []byte, container string, entry []field, owned []string) ([]byte, error) {
	f, err := parseTOML(data, container)
	if err != nil {
		return nil, err
	}
	if entry, err = f.withUserVars(entry); err != nil {
		return nil, err
	}
	if isSet, err := f.hasEntry(entry, owned); isSet || err != nil {
		return data, err
	}
	drop := append(keys(entry), owned...)
	var out bytes.Buffer
	at, hasHeader := 0, false // data before at is in out, or left out
	for _, e := range f.exprs {
		if !f.isEntry(e) {
			continue
		}
		switch key := f.entryKey(e); {
		case key == "":
			hasHeader = true
			out.Write(data[at:e.end])
			if !bytes.HasSuffix(data[:e.end], []byte("\n")) {
				out.WriteString(f.eol)
			}
			out.WriteString(f.lines(entry))
			at = e.end
		case slices.Contains(drop, key): // the header of a subtable of that name too
			out.Write(data[at:max(at, startOf(data, e))])
			at = e.end
		}
	}
	out.Write(data[at:])
	if !hasHeader { // append the table, behind a blank line
		if b := out.Bytes(); len(b) > 0 && b[len(b)-1] != '\n' {
			out.WriteString(f.eol)
		}
		if out.Len() > 0 {
			out.WriteString(f.eol)
		}
		out.WriteString("[" + strings.Join(f.path, ".") + "]" + f.eol + f.lines(entry))
	}
	return f.finish(out.Bytes())
}

// withUserVars returns the entry with the variables that the user added beside ours, sorted by name before
// them: setTOML writes a table of variables anew, as one line. A value that is not a string cannot be a
// variable, and is not dropped silently either.
func (f *tomlFile) withUserVars(entry []field) ([]field, error) {
	servers, _ := f.before[f.path[0]].(map[string]any)
	existing, _ := servers[EntryName].(map[string]any)
	entry = slices.Clone(entry)
	for i, e := range entry {
		ours, ok := e.value.([]EnvVar)
		if !ok {
			continue
		}
		old, _ := existing[e.key].(map[string]any)
		var all []EnvVar
		for _, name := range slices.Sorted(maps.Keys(old)) {
			text, ok := old[name].(string)
			switch {
			case slices.ContainsFunc(ours, func(v EnvVar) bool { return v.Name == name }):
			case !ok:
				return nil, fmt.Errorf("%w: %s.%s is not a string", ErrShape, e.key, name)
			default:
				all = append(all, EnvVar{name, text})
			}
		}
		entry[i].value = append(all, ours...)
	}
	return entry, nil
}

// hasEntry reports whether the file has the entry already, with none of the owned keys beyond it. Setting it
// again would only change how its lines are written.
func (f *tomlFile) hasEntry(entry []field, owned []string) (bool, error) {
	servers, _ := f.before[f.path[0]].(map[string]any)
	existing, ok := servers[EntryName].(map[string]any)
	if !ok {
		return false, nil
	}
	for _, key := range owned {
		if _, ok := existing[key]; ok && !slices.Contains(keys(entry), key) {
			return false, nil
		}
	}
	var want map[string]any
	if err := toml.Unmarshal([]byte(f.lines(entry)), &want); err != nil {
		return false, err
	}
	for key, value := range want {
		if !equalTOML(existing[key], value) {
			return false, nil
		}
	}
	return true, nil
}

// equalTOML compares values as text, since NaN differs from itself.
func equalTOML(a, b any) bool {
	x, errX := toml.Marshal(map[string]any{"v": a})
	y, errY := toml.Marshal(map[string]any{"v": b})
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// removeTOML is removeJSON for TOML. A blank line above a table of the entry goes with it, since setTOML adds
// one. A separate table [mcp_servers] stays: setTOML does not write one, so the user has.
func removeTOML(data []byte, container string) ([]byte, error) {
	f, err := parseTOML(data, container)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	at := 0
	for _, e := range f.exprs {
		if !f.isEntry(e) {
			continue
		}
		out.Write(data[at:max(at, startOf(data, e))])
		at = e.end
	}
	if at == 0 {
		return data, nil
	}
	out.Write(data[at:])
	return f.finish(out.Bytes())
}

// startOf returns where an expression begins: of a header, with a blank line above it.
func startOf(data []byte, e expr) int {
	if e.kind == unstable.KeyValue || e.start == 0 {
		return e.start
	}
	previous := bytes.LastIndexByte(data[:e.start-1], '\n') + 1
	if len(bytes.TrimSpace(data[previous:e.start])) == 0 {
		return previous
	}
	return e.start
}

// finish returns the edited text, after a check that nothing but the entry has changed. The check does not
// trust the edit: what it refuses is a fault of this package, and the user's file stays as it is.
func (f *tomlFile) finish(text []byte) ([]byte, error) {
	var after map[string]any
	if err := toml.Unmarshal(text, &after); err != nil {
		return nil, fmt.Errorf("%w: the edited text would not be TOML", ErrShape)
	}
	if !equalTOML(without(f.before, f.path[0]), without(after, f.path[0])) {
		return nil, fmt.Errorf("%w: the edit would change more than the entry", ErrShape)
	}
	return text, nil
}
