package stages

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/go-json-experiment/json/jsontext"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// LogFilter removes secrets from the lines of a log while a redact stage is enabled. Log lines belong
// to no scope, so it applies every enabled redact stage, whatever its scope. The zero value is ready;
// a Manager keeps it up to date (Options.LogFilter).
//
// A line is searched like a result: the values of named fields, the matches of patterns, in messages,
// stacks and fields of any type. In text, what follows a named field and = or : is a value as well:
// `password=…`, `"token": "…"`, `Authorization: …`. Encoded secrets, such as base64, are not found.
//
// It works at the log's core, so that no caller can forget it, and costs one atomic load a line
// while redaction is off.
type LogFilter struct {
	redactors atomic.Pointer[[]*redactor]
}

// list returns the enabled redactors.
func (f *LogFilter) list() []*redactor {
	if p := f.redactors.Load(); p != nil {
		return *p
	}
	return nil
}

// Clean removes the secrets from a text.
func (f *LogFilter) Clean(s string) string {
	for _, r := range f.list() {
		s = r.cleanLog(s)
	}
	return s
}

// Wrap returns a logger whose lines are filtered.
func (f *LogFilter) Wrap(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core { return &filteredCore{Core: c, plain: c, filter: f} }))
}

// filteredCore is a core with a filter. Core has the fields of With, encoded once, and writes what is
// not filtered; plain has none of them and gets them with each line that is filtered, since redaction
// may have been enabled after With.
type filteredCore struct {
	zapcore.Core
	plain  zapcore.Core
	fields []zapcore.Field // of With
	filter *LogFilter
}

// With implements zapcore.Core.
func (c *filteredCore) With(fields []zapcore.Field) zapcore.Core {
	return &filteredCore{c.Core.With(fields), c.plain, slices.Concat(c.fields, fields), c.filter}
}

// Check implements zapcore.Core.
func (c *filteredCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core.
func (c *filteredCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	list := c.filter.list()
	if len(list) == 0 {
		return c.Core.Write(e, fields)
	}
	fields = slices.Concat(c.fields, fields)
	for _, r := range list {
		e.Message, e.Stack = r.cleanLog(e.Message), r.cleanLog(e.Stack)
		fields = r.cleanFields(fields)
	}
	return c.plain.Write(e, fields)
}

// LineFilter returns a function that removes the secrets from the lines of one stream, such as the
// stderr of a plugin. It is called with each line in order, by one goroutine, and whether it will be
// logged.
func (c *filteredCore) LineFilter() func(line string, isLogged bool) string {
	return (&stream{filter: c.filter}).clean
}

// fieldEncoder encodes fields alone. Times and durations have no secrets, so any form will do.
var fieldEncoder = zapcore.NewJSONEncoder(zapcore.EncoderConfig{EncodeTime: zapcore.EpochTimeEncoder, EncodeDuration: zapcore.SecondsDurationEncoder, SkipLineEnding: true})

// cleanFields returns the fields without secrets. A field that has none keeps its form; one that has is
// replaced by its JSON.
func (r *redactor) cleanFields(fields []zapcore.Field) []zapcore.Field {
	out := make([]zapcore.Field, 0, len(fields))
	for _, f := range fields {
		buf, err := fieldEncoder.EncodeEntry(zapcore.Entry{}, []zapcore.Field{f})
		if err != nil {
			out = append(out, zap.String(r.cleanLog(f.Key), "[not encoded]"))
			continue
		}
		doc := slices.Clone(buf.Bytes())
		buf.Free()
		clean, changed, err := r.rewrite(doc, r.cleanLog)
		switch {
		case err != nil:
			out = append(out, zap.String(r.cleanLog(f.Key), Redacted))
		case !changed:
			out = append(out, f)
		default:
			out = append(out, memberFields(clean)...)
		}
	}
	return out
}

// memberFields returns the members of a JSON object as fields.
func memberFields(doc []byte) (fields []zapcore.Field) {
	dec := jsontext.NewDecoder(strings.NewReader(string(doc)), lenient...)
	if _, err := dec.ReadToken(); err != nil {
		return nil
	}
	for dec.PeekKind() == '"' {
		name, err := dec.ReadToken()
		if err != nil {
			return fields
		}
		key := name.String()
		value, err := dec.ReadValue()
		if err != nil {
			return fields
		}
		var text string
		if json.Unmarshal(value, &text) == nil && value[0] == '"' {
			fields = append(fields, zap.String(key, text))
		} else {
			fields = append(fields, zap.Reflect(key, json.RawMessage(slices.Clone(value))))
		}
	}
	return fields
}

// assignment returns the regular expression of a named field with its value in text. A value without
// quotes ends at white space or a separator after =, and at the end of the line after a colon, as in
// `Authorization: Bearer …`. nil: no fields.
func assignment(names map[string]bool) *regexp.Regexp {
	if len(names) == 0 {
		return nil
	}
	var list []string
	for name := range names {
		list = append(list, regexp.QuoteMeta(name))
	}
	slices.Sort(list)
	const quoted = `"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\\"(?:[^"\\]|\\[^"])*\\"`
	return regexp.MustCompile(`(?i)(?:` + strings.Join(list, "|") + `)(?:\\?["'])?(?:\s*=\s*(` + quoted + `|[^\s,;&"']+)|\s*:\s*(` + quoted + `|[^\s"'][^\r\n"']*))`)
}

// span is a part of a text, as offsets: from, and the first byte after it.
type span struct{ from, to int }

// secrets returns the parts of a text that are secrets, in any order.
func (r *redactor) secrets(text string) (spans []span) {
	for _, p := range r.patterns {
		for _, m := range p.FindAllStringIndex(text, -1) {
			spans = append(spans, span{m[0], m[1]})
		}
	}
	if r.assignments == nil {
		return spans
	}
	for _, m := range r.assignments.FindAllStringSubmatchIndex(text, -1) {
		for _, group := range []int{2, 4} { // the value after =, and the one after a colon
			if m[group] >= 0 && strings.Trim(text[m[group]:m[group+1]], `\"'`) != Redacted {
				spans = append(spans, span{m[group], m[group+1]})
			}
		}
	}
	return spans
}

// cleanLog is clean for a text of the log.
func (r *redactor) cleanLog(s string) string {
	s = r.clean(s)
	return replaceSpans(s, r.secrets(s))
}

// replaceSpans replaces the parts of a text by Redacted. Parts that touch become one; of one in
// quotes the quotes stay.
func replaceSpans(s string, spans []span) string {
	if len(spans) == 0 {
		return s
	}
	slices.SortFunc(spans, func(a, b span) int { return a.from - b.from })
	var b strings.Builder
	end := 0 // of what was copied or replaced
	for i, secret := range spans {
		if secret.to <= end {
			continue
		}
		if secret.from > end || i == 0 {
			b.WriteString(s[end:secret.from])
			quote := ""
			if old := s[secret.from:secret.to]; len(old) > 1 && (old[0] == '"' || old[0] == '\'') && old[len(old)-1] == old[0] {
				quote = old[:1]
			}
			b.WriteString(quote + Redacted + quote)
		}
		end = secret.to
	}
	return b.String() + s[end:]
}

// Bounds of what a stream keeps of earlier lines, bytes.
const (
	maxRecent = 1 << 10 // in which a secret may have begun without being recognized
	maxOpen   = 8 << 10 // of a secret that has not ended: its first and its last half
)

// stream cleans the lines of one stream. A secret may have several lines: a private key does. So each
// line is searched together with `before`: the beginning of a secret that reached up to the end of the
// last line (isOpen), or else the last few lines. What was logged before a pattern matched cannot be
// taken back.
type stream struct {
	filter *LogFilter
	before string // earlier lines, with line ends
	isOpen bool   // before is the beginning of a secret
}

// clean returns the line, which has no line end, without secrets. A line that is not going to be
// logged is only kept for those after it, which costs little.
func (s *stream) clean(line string, isLogged bool) string {
	list := s.filter.list()
	if len(list) == 0 {
		s.before = ""
		return line
	}
	text := s.before + line
	open := len(text) // where a secret begins that reaches up to the end; len(text): there is none
	if isLogged {
		line, open = s.redact(list, text, line)
	} else if s.isOpen {
		open = 0
	}
	s.keep(text, open)
	return line
}

// redact removes the secrets from line, which text ends with, and returns where a secret begins that
// reaches up to the end of text.
func (s *stream) redact(list []*redactor, text, line string) (clean string, open int) {
	start := len(text) - len(line)
	var spans []span // of line
	open = len(text)
	for _, r := range list {
		for _, secret := range r.secrets(text) {
			if secret.to == len(text) {
				open = min(open, secret.from)
			}
			if secret.to > start {
				spans = append(spans, span{max(secret.from-start, 0), secret.to - start})
			}
		}
	}
	clean = replaceSpans(line, spans)
	for _, r := range list {
		clean = r.clean(clean)
	}
	return clean, open
}

// keep stores what the next lines are searched together with.
func (s *stream) keep(text string, open int) {
	if s.isOpen = open < len(text); !s.isOpen {
		s.before = text[max(0, len(text)-maxRecent):] + "\n"
		return
	}
	if text = text[open:]; len(text) > maxOpen { // how it begins, and whether it has ended
		text = text[:maxOpen/2] + text[len(text)-maxOpen/2:]
	}
	s.before = text + "\n"
}
