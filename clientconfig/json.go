package clientconfig

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/tailscale/hujson"
)

// maxDepth bounds how deep brackets nest in a file. The parser is recursive, and a goroutine whose stack
// reaches its limit ends the process: recover does not help.
const maxDepth = 10000

// bom is a byte order mark, which some Windows editors write. A parser may refuse it (RFC 8259 §8.1), as
// ours does, so it is removed before the text is parsed, and put back.
var bom = []byte("\xef\xbb\xbf")

// jsonFile is a JSON file, with or without comments, that is edited in place.
//
// The edit works on the syntax tree of the text and not on decoded values: whoever wrote the file finds
// every byte outside of the entry as it was, comments included. What that could get wrong is checked
// afterwards, by comparing the decoded content of both texts except for the entry (before).
//
// In hujson's tree each value has the white space and the comments around it as Extras:
//
//	{ // c1
//	  "a": 1, // c2       BeforeExtra of the name "a" is " // c1\n  "
//	}                     AfterExtra of the object is " // c2\n"
//
// AfterExtra of a member's value is what is before its comma. On the last member it is nil without a
// trailing comma, and not nil with one, even if empty. A comment behind a member therefore belongs to
// the next name, or to the object: add and remove keep it where it is.
type jsonFile struct {
	bom    []byte
	root   hujson.Value
	before any    // the content, to check the edit
	eol    string // "\n", or "\r\n" as in the file; "" for a file on a single line
	unit   string // indentation of one level
}

// parseJSON parses a file, and finds out how its lines end and how it is indented. An empty file is an
// object without members.
func parseJSON(data []byte) (*jsonFile, error) {
	f := &jsonFile{eol: "\n", unit: "  "}
	text, hasBOM := bytes.CutPrefix(data, bom)
	if hasBOM {
		f.bom = bom
	}
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("{}\n")
	}
	if depth(text) > maxDepth {
		return nil, fmt.Errorf("%w: brackets nest deeper than %d levels", ErrSyntax, maxDepth)
	}
	var err error
	if f.root, err = hujson.Parse(text); err != nil {
		return nil, fmt.Errorf("%w: not JSON: %s", ErrSyntax, strings.TrimPrefix(err.Error(), "hujson: "))
	}
	if f.before, err = decodeJSON(f.root); err != nil {
		return nil, err
	}
	obj, ok := f.root.Value.(*hujson.Object)
	if !ok {
		return nil, fmt.Errorf("%w: it does not hold an object", ErrShape)
	}
	switch {
	case bytes.Contains(text, []byte("\r\n")):
		f.eol = "\r\n"
	case len(obj.Members) > 0 && !bytes.Contains(bytes.TrimSpace(text), []byte("\n")):
		f.eol = ""
	}
	if len(obj.Members) > 0 { // the first member is one level deep
		if indent := indentation(obj.Members[0].Name.BeforeExtra); indent != "" {
			f.unit = indent
		}
	}
	return f, nil
}

// depth returns an upper bound of how deep brackets nest. It also counts those in strings and comments,
// which only matters for a file with ten thousand of them, and needs no parser.
func depth(text []byte) (deepest int) {
	n := 0
	for _, c := range text {
		switch c {
		case '[', '{':
			n++
			deepest = max(deepest, n)
		case ']', '}':
			n = max(n-1, 0)
		}
	}
	return deepest
}

// decodeJSON returns the content, without comments.
func decodeJSON(v hujson.Value) (content any, err error) {
	v = v.Clone()
	v.Standardize()
	dec := json.NewDecoder(bytes.NewReader(v.Pack()))
	dec.UseNumber() // a float64 would hide a change of a long number
	if err := dec.Decode(&content); err != nil {
		return nil, fmt.Errorf("%w: not JSON: %w", ErrSyntax, err)
	}
	return content, nil
}

// indentation returns the white space behind the last line break of what is before a value.
func indentation(extra hujson.Extra) string {
	line := string(extra[bytes.LastIndexByte(extra, '\n')+1:])
	if strings.Trim(line, " \t") != "" {
		return ""
	}
	return line
}

// member returns the value of a key; nil if there is none. A key that is there twice is refused:
// programs differ in which one they use.
func member(obj *hujson.Object, key string) (*hujson.Value, error) {
	var found *hujson.Value
	for i := range obj.Members {
		if name, ok := obj.Members[i].Name.Value.(hujson.Literal); ok && name.String() == key {
			if found != nil {
				return nil, fmt.Errorf("%w: the key %q is given twice", ErrShape, key)
			}
			found = &obj.Members[i].Value
		}
	}
	return found, nil
}

// object returns the object that is the value of a key; nil if there is none.
func object(obj *hujson.Object, key string) (*hujson.Object, error) {
	v, err := member(obj, key)
	if v == nil || err != nil {
		return nil, err
	}
	o, ok := v.Value.(*hujson.Object)
	if !ok {
		return nil, fmt.Errorf("%w: the value of %q is not an object", ErrShape, key)
	}
	return o, nil
}

// add appends a member. indent is the indentation of the line with the closing bracket.
func (f *jsonFile) add(obj *hujson.Object, indent, key string, value any) {
	text := f.format(value, indent+f.unit)
	parsed, err := hujson.Parse([]byte(text))
	if err != nil {
		panic("clientconfig: " + err.Error()) // it is our own text
	}
	// What is before the closing bracket may hold a comment on the last member, which then stays before
	// the new one. Only the last line break and the indentation stay before the bracket.
	before, last := obj.AfterExtra, bytes.LastIndexByte(obj.AfterExtra, '\n')
	after := hujson.Extra(nil)
	if last >= 0 {
		if last > 0 && before[last-1] == '\r' {
			last--
		}
		before, after = obj.AfterExtra[:last], obj.AfterExtra[last:]
	} else if f.eol != "" {
		after = hujson.Extra(f.eol + indent)
	}
	lead := f.eol + indent + f.unit
	if f.eol == "" { // all on one line
		lead = ""
		if len(obj.Members) > 0 && len(before) == 0 {
			lead = " "
		}
	}
	m := hujson.ObjectMember{Name: hujson.Value{Value: hujson.String(key)}, Value: parsed}
	m.Name.BeforeExtra = append(append(hujson.Extra(nil), before...), lead...)
	m.Value.BeforeExtra = hujson.Extra(" ")
	if n := len(obj.Members); n > 0 && obj.Members[n-1].Value.AfterExtra != nil { // a trailing comma
		m.Value.AfterExtra = hujson.Extra{}
	}
	obj.Members, obj.AfterExtra = append(obj.Members, m), after
}

// format returns the value of a field as text: an object on a line for each member, an array on one line.
// indent is the indentation of the line that it begins in.
func (f *jsonFile) format(value any, indent string) string {
	switch v := value.(type) {
	case []field:
		lines := make([]string, len(v))
		for i, e := range v {
			lines[i] = string(hujson.String(e.key)) + ": " + f.format(e.value, indent+f.unit)
		}
		if f.eol == "" || len(lines) == 0 {
			return "{" + strings.Join(lines, ", ") + "}"
		}
		sep := f.eol + indent + f.unit
		return "{" + sep + strings.Join(lines, ","+sep) + f.eol + indent + "}"
	case []EnvVar:
		return f.format(varFields(v), indent)
	case []string:
		items := make([]string, len(v))
		for i, s := range v {
			items[i] = string(hujson.String(s))
		}
		return "[" + strings.Join(items, ", ") + "]"
	case bool:
		return strconv.FormatBool(v)
	case int:
		return strconv.Itoa(v)
	}
	return string(hujson.String(value.(string)))
}

// setJSON returns data with an entry in the container. Owned keys that the entry does not have
// are removed from an entry that is there: a url beside a command would leave it to the client which one
// counts. A missing container is added at the end of the root.
func setJSON(data []byte, container string, entry []field, owned []string) ([]byte, error) {
	f, err := parseJSON(data)
	if err != nil {
		return nil, err
	}
	root := f.root.Value.(*hujson.Object)
	servers, err := object(root, container)
	if err != nil {
		return nil, err
	}
	if servers == nil { // the first server of this client
		f.add(root, "", container, []field{})
		servers = root.Members[len(root.Members)-1].Value.Value.(*hujson.Object)
	}
	existing, err := object(servers, EntryName)
	if err != nil {
		return nil, err
	}
	if existing == nil {
		f.add(servers, f.unit, EntryName, entry)
	} else {
		changed, err := f.update(existing, f.unit+f.unit, entry, owned)
		if err != nil || !changed {
			return data, err
		}
	}
	return f.finish(container)
}

// update removes the owned keys that the entry does not have and sets those that it has. A value that is
// equal stays as it is written. changed is false if all were. indent is that of the line with the closing
// bracket of existing.
//
// Variables and headers are set one by one, since the user may have added others beside ours.
func (f *jsonFile) update(existing *hujson.Object, indent string, entry []field, owned []string) (changed bool, err error) {
	set := keys(entry)
	for _, key := range owned {
		v, err := member(existing, key)
		if err != nil {
			return false, err
		}
		if v != nil && !slices.Contains(set, key) {
			remove(existing, key)
			changed = true
		}
	}
	for _, e := range entry {
		v, err := member(existing, e.key)
		if err != nil {
			return false, err
		}
		if vars, ok := e.value.([]EnvVar); ok && v != nil {
			if object, ok := v.Value.(*hujson.Object); ok {
				isChanged, err := f.update(object, indent+f.unit, varFields(vars), nil)
				if err != nil {
					return false, err
				}
				changed = changed || isChanged
				continue
			}
		}
		text := f.format(e.value, indent+f.unit)
		want, err := hujson.Parse([]byte(text))
		if err != nil {
			return false, err
		}
		switch {
		case v == nil:
			f.add(existing, indent, e.key, e.value)
		case equalJSON(*v, want):
			continue
		default:
			v.Value = want.Value
		}
		changed = true
	}
	return changed, nil
}

// equalJSON compares what values decode to: neither white space nor the order of members counts.
func equalJSON(a, b hujson.Value) bool {
	x, errX := decodeJSON(a)
	y, errY := decodeJSON(b)
	return errX == nil && errY == nil && reflect.DeepEqual(x, y)
}

// remove removes a member, and keeps every comment around it. It is the opposite of add: what is before
// the member goes to the next one, or behind the last one that stays.
func remove(obj *hujson.Object, key string) {
	i := slices.IndexFunc(obj.Members, func(m hujson.ObjectMember) bool {
		name, ok := m.Name.Value.(hujson.Literal)
		return ok && name.String() == key
	})
	before, hasComma := obj.Members[i].Name.BeforeExtra, obj.Members[i].Value.AfterExtra != nil
	obj.Members = slices.Delete(obj.Members, i, i+1)
	if i < len(obj.Members) {
		next := &obj.Members[i].Name.BeforeExtra
		switch {
		case isBlank(*next):
			*next = before
		case !isBlank(before):
			*next = append(before, *next...)
		}
		return
	}
	if at := bytes.LastIndexByte(before, '\n'); at >= 0 && bytes.HasPrefix(bytes.TrimPrefix(obj.AfterExtra, []byte("\r")), []byte("\n")) {
		before = bytes.TrimSuffix(before[:at], []byte("\r")) // the other line break is enough
	} else if isBlank(before) {
		before = nil
	}
	if i > 0 {
		switch previous := &obj.Members[i-1].Value; {
		case hasComma && previous.AfterExtra == nil:
			previous.AfterExtra = hujson.Extra{}
		case !hasComma:
			before = append(slices.Clone(previous.AfterExtra), before...)
			previous.AfterExtra = nil
		}
	}
	obj.AfterExtra = append(slices.Clone(before), obj.AfterExtra...)
	if len(obj.Members) == 0 && isBlank(obj.AfterExtra) {
		obj.AfterExtra = nil
	}
}

// isBlank reports whether there is no comment: an Extra holds white space and comments only.
func isBlank(extra hujson.Extra) bool { return len(bytes.TrimSpace(extra)) == 0 }

// removeJSON returns data without the entry. A container that is empty then is removed too,
// unless it holds a comment.
func removeJSON(data []byte, container string) ([]byte, error) {
	f, err := parseJSON(data)
	if err != nil {
		return nil, err
	}
	servers, err := object(f.root.Value.(*hujson.Object), container)
	if servers == nil || err != nil {
		return data, err
	}
	if existing, err := member(servers, EntryName); existing == nil || err != nil {
		return data, err
	}
	remove(servers, EntryName)
	if len(servers.Members) == 0 && isBlank(servers.AfterExtra) { // maybe Connect added it
		remove(f.root.Value.(*hujson.Object), container)
	}
	return f.finish(container)
}

// finish returns the edited text, after a check that nothing but the entry has changed. The text is parsed
// again for that: what counts is what the client will read, not the tree that was edited.
func (f *jsonFile) finish(container string) ([]byte, error) {
	text := f.root.Pack()
	again, err := hujson.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%w: the edited text would not be JSON", ErrShape)
	}
	after, err := decodeJSON(again)
	if err != nil {
		return nil, err
	}
	if !reflect.DeepEqual(without(f.before, container), without(after, container)) {
		return nil, fmt.Errorf("%w: the edit would change more than the entry", ErrShape)
	}
	return append(slices.Clone(f.bom), text...), nil
}

// without returns the content of a file without our entry, and without a container that is
// empty then: Connect may add both, and Disconnect remove both. It changes the maps that it gets.
func without(content any, container string) any {
	root, ok := content.(map[string]any)
	if !ok {
		return content
	}
	if servers, ok := root[container].(map[string]any); ok {
		delete(servers, EntryName)
		if len(servers) == 0 {
			delete(root, container)
		}
	}
	return root
}
