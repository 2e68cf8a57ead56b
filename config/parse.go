package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"

	"agentctl/duration"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/suggest"
)

// maxConfigFile bounds a configuration file, bytes.
//
// With it the parser's memory is bounded too: the nodes of YAML take some tens of times the
// text, and aliases, which could multiply it, are refused.
const maxConfigFile = 256 << 10

// fileParser reads one YAML file and collects its errors. It walks the nodes of
// the YAML library instead of decoding them into values, for two reasons: each error names
// its line, and only plain YAML is accepted, so that the JSON Schema describes the same
// files. Each method that reads a value reports an error itself and returns false.
//
// The tag of a node is what the library resolved it to (!!str, !!int, !!bool, ...). The
// methods compare it before they use the value: the library would convert between types.
type fileParser struct {
	path string
	out  Settings
	errs Errors
}

// ReadFile reads and checks a file; see IsMissing for one that does not exist.
//
// The settings that are valid are returned beside the errors, so that a caller can go on and find
// the errors of other files.
func ReadFile(path string) (Settings, Errors) {
	b, err := readRegular(path)
	if err != nil {
		return nil, Errors{err}
	}
	return parseFile(path, b)
}

// readRegular reads a regular file of bounded size. O_NONBLOCK keeps the open of a FIFO
// from waiting for a writer.
func readRegular(path string) ([]byte, error) {
	notRegular := &Error{Where: path, Problem: "is not a regular file; write the settings into a YAML file"}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.ELOOP) { // a socket, a circle of links
		return nil, notRegular
	}
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, notRegular
	}
	b, err := io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	if len(b) > maxConfigFile {
		return nil, &Error{Where: path, Problem: "is larger than 256 KiB; a configuration is a few lines"}
	}
	return b, nil
}

// parseFile reads and checks the text of a file.
//
// An empty file is valid. A second document is not: most YAML libraries would ignore it, and
// with it the settings that somebody appended after a ---.
func parseFile(path string, b []byte) (Settings, Errors) {
	p := &fileParser{path: path, out: Settings{}}
	dec := yaml.NewDecoder(bytes.NewReader(b))
	var doc, second yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return p.out, nil // empty, or comments only
	}
	if err == nil && len(doc.Content) == 1 {
		p.document(doc.Content[0])
		if err = dec.Decode(&second); errors.Is(err, io.EOF) {
			err = nil
		} else if err == nil {
			err = errors.New("there is a second document; write all settings into one")
		}
	}
	if err != nil {
		p.syntax(err)
	}
	return p.out, p.errs
}

// syntax adds an error of the YAML library, and moves its line number to the front.
//
// The library stops at its first error, so that a file has at most one of these.
func (p *fileParser) syntax(err error) {
	what := strings.TrimPrefix(err.Error(), "yaml: ")
	where := p.path
	if rest, ok := strings.CutPrefix(what, "line "); ok {
		line, text, _ := strings.Cut(rest, ": ")
		where, what = p.path+":"+line, text
	}
	p.errs = append(p.errs, &Error{Where: where, Problem: "is not YAML: " + what, quotes: true})
}

// at returns the origin of a value: FILE:LINE.
func (p *fileParser) at(n *yaml.Node) string { return fmt.Sprintf("%s:%d", p.path, n.Line) }

// fail adds an error about the value n of a key; its text ends with what to write instead.
func (p *fileParser) fail(n *yaml.Node, key, format string, args ...any) {
	p.errs = append(p.errs, &Error{Where: p.at(n), Key: key, Problem: fmt.Sprintf(format, args...), quotes: true})
}

// pairs calls fn for each known key of a mapping. Unknown and repeated keys, and anchors,
// are errors. name is the path of the mapping, "" for the document.
//
// It goes on after an error, so that a person sees everything that is wrong at once. known is
// in the order in which errors list it.
func (p *fileParser) pairs(n *yaml.Node, name string, known []string, fn func(key string, v *yaml.Node)) {
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		full := strings.TrimPrefix(name+"."+k.Value, ".")
		switch {
		case k.Kind != yaml.ScalarNode || k.Tag != "!!str":
			p.fail(k, name, "a key must be a plain word; write one of %s", strings.Join(known, ", "))
		case !slices.Contains(known, k.Value):
			p.fail(k, full[:min(len(full), 64)], "unknown key%s", p.near(k.Value, full, known))
		case seen[k.Value]:
			p.fail(k, full, "is given twice; keep one")
		case v.Kind == yaml.AliasNode || v.Anchor != "":
			p.fail(v, full, "anchors and aliases are not read; write the value out")
		default:
			seen[k.Value] = true
			fn(k.Value, v)
		}
	}
}

// near suggests the key that was probably meant: of the same mapping, else of all.
//
// A dotted name (history.flush: 10m) is a frequent mistake: it is how `config set` and the
// documentation write keys, but in YAML it is one long key.
func (p *fileParser) near(word, full string, known []string) string {
	if group, leaf, ok := strings.Cut(word, "."); ok && FindKey(full) != nil {
		return fmt.Sprintf("; write it as two lines: %q, and %q indented below it", group+":", leaf+": ...")
	}
	if hint := suggest.Hint(word, known); hint != "" {
		return hint
	}
	all := make([]string, 0, len(keys))
	for i := range keys {
		name := keys[i].Name
		if _, leaf, ok := strings.Cut(name, "."); ok && leaf == word {
			return fmt.Sprintf(", did you mean %q?", name)
		}
		all = append(all, name)
	}
	if hint := suggest.Hint(full, all); hint != "" && word == full {
		return hint
	}
	return "; the keys are " + strings.Join(known, ", ")
}

// document reads the top mapping, which may be empty.
func (p *fileParser) document(n *yaml.Node) {
	if n.Tag == "!!null" {
		return
	}
	if n.Kind != yaml.MappingNode {
		p.fail(n, "", "the file must hold keys and values, like base_interval_ms: 1000")
		return
	}
	groups := keyGroups()
	known := slices.Clone(groups)
	for i := range keys {
		if !strings.Contains(keys[i].Name, ".") {
			known = append(known, keys[i].Name)
		}
	}
	p.pairs(n, "", known, func(key string, v *yaml.Node) {
		if slices.Contains(groups, key) {
			p.group(key, v)
			return
		}
		p.key(FindKey(key), v)
	})
}

// group reads the mapping of a key group, which may be empty.
func (p *fileParser) group(name string, n *yaml.Node) {
	if n.Tag == "!!null" {
		return
	}
	var known []string
	for i := range keys {
		if group, leaf, ok := strings.Cut(keys[i].Name, "."); ok && group == name {
			known = append(known, leaf)
		}
	}
	if name == "module_intervals" {
		for m := range prober.NumModules {
			if other := m.OtherName(); other != "" {
				known = append(known, other)
			}
		}
	}
	if n.Kind != yaml.MappingNode {
		p.fail(n, name, "must be a map with %s", strings.Join(known, ", "))
		return
	}
	p.pairs(n, name, known, func(key string, v *yaml.Node) {
		k := FindKey(name + "." + key)
		if first, twice := p.out[k.Name]; twice { // by two names of a module
			p.fail(v, name+"."+key, "%s is set in %s already; keep one", k.Name, first.Origin)
			return
		}
		p.key(k, v)
	})
}

// key reads the value of a key.
func (p *fileParser) key(k *Key, n *yaml.Node) {
	var v any
	ok := true
	switch k.Kind {
	case KindText, KindPath:
		v, ok = p.text(n, k.Name, k.expected())
	case KindInt:
		v, ok = p.whole(n, k)
	case KindBool:
		var b bool
		ok = n.Kind == yaml.ScalarNode && n.Tag == "!!bool" && n.Decode(&b) == nil
		v = b
		if !ok {
			p.fail(n, k.Name, "%s is neither true nor false; write true or false", shown(n))
		}
	case KindDuration:
		v, ok = p.duration(n, k.Name, k.expected())
	case KindWords:
		v, ok = p.list(n, k)
	case KindRules:
		v, ok = p.rules(n, k)
	}
	if !ok {
		return
	}
	if err := k.checkValue(v); err != nil {
		// alert.Check returns several errors as lines of one text.
		for line := range strings.SplitSeq(err.Error(), "\n") {
			p.fail(n, k.Name, "%s", line)
		}
		return
	}
	p.out[k.Name] = Setting{v, p.at(n)}
}

// shown returns a value as an error shows it.
func shown(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a map"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Tag == "!!null":
		return "nothing"
	}
	return fmt.Sprintf("%.40q", n.Value)
}

// text reads a string. YAML reads an unquoted 5 or true as another type; the error then
// suggests quotes. expected says what to write.
func (p *fileParser) text(n *yaml.Node, key, expected string) (string, bool) {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		return n.Value, true
	}
	quotes := ""
	if n.Kind == yaml.ScalarNode && n.Tag != "!!null" {
		quotes = " in quotes"
	}
	p.fail(n, key, "%s is not text; write %s%s", shown(n), expected, quotes)
	return "", false
}

// number reads a finite number; if n is not one, ok is false and no error is added.
func (p *fileParser) number(n *yaml.Node) (float64, bool) {
	var f float64
	ok := n.Kind == yaml.ScalarNode && (n.Tag == "!!int" || n.Tag == "!!float") && n.Decode(&f) == nil
	return f, ok && !math.IsNaN(f) && !math.IsInf(f, 0)
}

// whole reads an integer, which may be written 1000.0, as in JSON.
//
// A float64 is exact below 2^53. Larger numbers would be rounded without an error, so they
// are refused.
func (p *fileParser) whole(n *yaml.Node, k *Key) (int64, bool) {
	f, ok := p.number(n)
	if !ok || f != math.Trunc(f) || math.Abs(f) >= 1<<53 {
		p.fail(n, k.Name, "%s is not a whole number; write %s", shown(n), k.expected())
		return 0, false
	}
	return int64(f), true
}

// duration reads a string with units, or the number 0.
//
// A number without a unit is refused except 0, because the keys in milliseconds beside it
// would make every guess wrong half of the time. expected says what to write.
func (p *fileParser) duration(n *yaml.Node, key, expected string) (time.Duration, bool) {
	if n.Kind == yaml.ScalarNode && (n.Tag == "!!str" || n.Tag == "!!int") {
		d, err := duration.Parse(n.Value)
		if err == nil {
			return d, true
		}
		p.fail(n, key, "%v; write %s", err, expected)
		return 0, false
	}
	p.fail(n, key, "%s is not a duration; write %s", shown(n), expected)
	return 0, false
}

// list reads a sequence of strings. It reports each wrong item, and not only the first.
func (p *fileParser) list(n *yaml.Node, k *Key) ([]string, bool) {
	if n.Kind != yaml.SequenceNode {
		p.fail(n, k.Name, "%s is not a list; write %s", shown(n), k.expected())
		return nil, false
	}
	words, before := []string{}, len(p.errs)
	for _, item := range n.Content {
		if w, ok := p.text(item, k.Name, k.expected()); ok {
			words = append(words, k.word(w))
		}
	}
	return words, len(p.errs) == before
}

// rules reads the alert rules, and checks each one, so that an error names its line.
//
// Rules are checked again as a set with the built-in ones, by checkTogether.
func (p *fileParser) rules(n *yaml.Node, k *Key) ([]alert.Rule, bool) {
	if n.Kind != yaml.SequenceNode {
		p.fail(n, k.Name, "%s is not a list; write %s", shown(n), k.expected())
		return nil, false
	}
	rules, wrong := []alert.Rule{}, len(p.errs)
	for i, item := range n.Content {
		name, before := fmt.Sprintf("%s[%d]", k.Name, i), len(p.errs)
		if item.Kind != yaml.MappingNode {
			p.fail(item, name, "%s is not a rule; write %s", shown(item), k.expected())
			continue
		}
		r := p.rule(item, name)
		if len(p.errs) > before {
			continue
		}
		if err := alert.Check([]alert.Rule{r}); err != nil {
			for line := range strings.SplitSeq(err.Error(), "\n") {
				p.fail(item, name, "%s", strings.TrimPrefix(line, "alert rule "))
			}
		}
		if slices.ContainsFunc(rules, func(o alert.Rule) bool { return o.ID == r.ID }) {
			p.fail(item, name, "another rule has the id %q; give it another", r.ID)
		}
		rules = append(rules, r)
	}
	return rules, len(p.errs) == wrong
}

// rule reads the mapping of one alert rule.
//
// A missing for or clear_for stays zero, which package alert takes as its default. A value
// that cannot be read is reported and left zero; the caller then drops the rule.
func (p *fileParser) rule(n *yaml.Node, name string) alert.Rule {
	var r alert.Rule
	given := map[string]bool{}
	p.pairs(n, name, ruleKeys, func(key string, v *yaml.Node) {
		given[key] = true
		full := name + "." + key
		text := func(expected string) string { s, _ := p.text(v, full, expected); return s }
		number := func() float64 {
			f, ok := p.number(v)
			if !ok {
				p.fail(v, full, "%s is not a number; write one without a unit", shown(v))
			}
			return f
		}
		switch key {
		case "id":
			r.ID = text("a short name")
		case "metric":
			r.Metric = alert.MetricName(text("the name of a figure"))
		case "op":
			r.Op = alert.Op(text("one of >, >=, <, <="))
		case "level":
			r.Level = alert.Level(text("one of info, warn, error"))
		case "threshold":
			r.Threshold = number()
		case "hysteresis":
			r.Hysteresis = number()
		case "for":
			r.For, _ = p.duration(v, full, "0 to 24h")
		case "clear_for":
			r.ClearFor, _ = p.duration(v, full, "0 to 24h")
		}
	})
	for _, key := range []string{"id", "metric", "op", "threshold", "level"} {
		if !given[key] {
			p.fail(n, name, "%s is missing; a rule has %s", key, strings.Join(ruleKeys, ", "))
		}
	}
	return r
}
