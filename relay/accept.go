package relay

import (
	"slices"
	"strings"

	"agentctl/lazyregexp"
)

// parseAccept reports which of the two answers a caller accepts (RFC 9110 §12.5.1). No
// Accept, and */*, mean JSON; of several ranges that match it the most specific decides. A
// type with q=0 is not accepted. A stream must be asked for by its name, so that a client
// which accepts anything gets one answer and not an endless one.
//
// mime.ParseMediaType is no help: it does not split at commas, refuses "q = 0" and
// allocates on every call.
func parseAccept(values []string) (wantJSON, wantStream bool) {
	given, best := false, -1 // best is the index in jsonRanges of the most specific range so far
	rest := strings.Join(values, ",")
	for more := true; more; {
		var item string
		if item, rest, more = cutUnquoted(rest, ','); strings.TrimSpace(item) == "" {
			continue
		}
		given = true
		typ, params, _ := cutUnquoted(item, ';')
		typ = strings.ToLower(strings.TrimSpace(typ))
		accepted := hasWeight(params)
		wantStream = wantStream || typ == "text/event-stream" && accepted
		switch i := slices.Index(jsonRanges, typ); {
		case i > best:
			best, wantJSON = i, accepted
		case i >= 0 && i == best:
			wantJSON = wantJSON || accepted
		}
	}
	return wantJSON || !given, wantStream
}

// jsonRanges are the media ranges that match application/json, the least specific first.
var jsonRanges = []string{"*/*", "application/*", "application/json"}

// hasWeight reports whether the parameters of a media range leave it a weight above 0. The
// default weight is 1; a malformed one counts as 0, so that a range is not accepted by
// mistake. Parameters other than q are ignored.
func hasWeight(params string) bool {
	for more := true; more; {
		var p string
		p, params, more = cutUnquoted(params, ';')
		name, q, _ := strings.Cut(p, "=")
		q = strings.TrimSpace(q)
		if strings.EqualFold(strings.TrimSpace(name), "q") && (!qvalue.MatchString(q) || strings.Trim(q, "0.") == "") {
			return false
		}
	}
	return true
}

var qvalue = lazyregexp.New(`^(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)$`) // RFC 9110 §12.4.2

// cutUnquoted is strings.Cut at a byte that is not inside a quoted string (RFC 9110 §5.6.4),
// in which a backslash escapes the next byte.
func cutUnquoted(s string, sep byte) (before, after string, found bool) {
	quoted := false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			quoted = !quoted
		case c == '\\' && quoted:
			i++
		case c == sep && !quoted:
			return s[:i], s[i+1:], true
		}
	}
	return s, "", false
}
