package fleet

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"agentctl/relay/plugins/arguments"
	"agentctl/suggest"
)

// The grammar of where, in full. Words may be in upper case; and binds stronger than or.
//
//	where      = term { "or" term }
//	term       = factor { "and" factor }
//	factor     = comparison | "(" where ")"
//	comparison = metric operator number
//	operator   = ">" | ">=" | "<" | "<=" | "=" | "==" | "!="
//	metric     = one of metrics
//
// A figure that is not known makes a comparison unknown. What remains unknown selects no board:
// the answer counts those boards, so that nobody takes them for boards that do not match.

// Bounds of where.
const (
	maxWhere       = 300 // characters
	maxComparisons = 16
	maxDepth       = 8 // of parentheses
)

// truth is the value of a condition. The order of the values makes "and" their minimum and "or" their
// maximum.
type truth int8

const (
	isFalse truth = iota - 1
	isUnknown
	isTrue
)

// condition is a node of a parsed where: an "or" or an "and" of parts, or the comparison of a metric with a
// number. It is read only once it is parsed.
type condition struct {
	op     string // "or", "and", or a comparison's operator
	parts  []*condition
	metric int // index in metrics
	number float64
}

// eval returns the condition's value for some figures: the logic of Kleene, in which false and
// unknown is false, and true or unknown is true.
func (c *condition) eval(f *figures) truth {
	switch c.op {
	case "or":
		value := isFalse
		for _, p := range c.parts {
			value = max(value, p.eval(f))
		}
		return value
	case "and":
		value := isTrue
		for _, p := range c.parts {
			value = min(value, p.eval(f))
		}
		return value
	}
	v := f.values[c.metric]
	if math.IsNaN(v) {
		return isUnknown
	}
	if c.holds(v) {
		return isTrue
	}
	return isFalse
}

// holds is the comparison with a known figure.
func (c *condition) holds(v float64) bool {
	switch c.op {
	case ">":
		return v > c.number
	case ">=":
		return v >= c.number
	case "<":
		return v < c.number
	case "<=":
		return v <= c.number
	case "=":
		return v == c.number
	}
	return v != c.number
}

// uses marks the metrics of the condition.
func (c *condition) uses(used *[numMetrics]bool) {
	if c.parts == nil {
		used[c.metric] = true
	}
	for _, p := range c.parts {
		p.uses(used)
	}
}

// parser reads a where from left to right, without going back: each rule of the grammar is a method, which
// decides by the next token, and consumes it with accept or by moving pos.
type parser struct {
	text        string
	pos         int // of the next character
	comparisons int
}

// parseWhere parses a condition. The error is an E_MANIFEST_INVALID that says where it stopped, what
// is allowed there, and an example; it does not repeat the text.
func parseWhere(text string) (*condition, error) {
	p := &parser{text: text}
	c, err := p.or(0)
	if err != nil {
		return nil, err
	}
	if p.token() != "" {
		return nil, p.fail("and, or, or the end")
	}
	return c, nil
}

// fail is the error at the present place. expected is in words of the grammar, never of the caller.
func (p *parser) fail(expected string) error {
	p.skipSpace()
	place := fmt.Sprintf("at character %d", p.pos+1)
	if p.pos == len(p.text) {
		place = "at the end"
	}
	return arguments.Invalid("argument where: %s: expected %s; example: cpu_pct > 80 and disk_pct > 90", place, expected)
}

func (p *parser) skipSpace() {
	for p.pos < len(p.text) && strings.IndexByte(" \t\r\n", p.text[p.pos]) >= 0 {
		p.pos++
	}
}

// Characters of tokens. A number begins like a sign or a digit.
const (
	wordChars   = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
	numberChars = "0123456789.eE+-"
	opChars     = "<>=!"
)

// token returns the next token without taking it: a word, a number, an operator, or one character;
// "" at the end.
func (p *parser) token() string {
	p.skipSpace()
	rest := p.text[p.pos:]
	if rest == "" {
		return ""
	}
	var chars string
	switch {
	case strings.IndexByte("+-.0123456789", rest[0]) >= 0:
		chars = numberChars
	case strings.IndexByte(wordChars, rest[0]) >= 0:
		chars = wordChars
	case strings.IndexByte(opChars, rest[0]) >= 0:
		chars = opChars
	default:
		return rest[:1]
	}
	n := 0
	for n < len(rest) && strings.IndexByte(chars, rest[n]) >= 0 {
		n++
	}
	return rest[:n]
}

// accept takes the next token if it is the given one.
func (p *parser) accept(token string) bool {
	t := p.token()
	if !strings.EqualFold(t, token) {
		return false
	}
	p.pos += len(t)
	return true
}

// or parses a "where" of the grammar. depth is how many parentheses are open.
func (p *parser) or(depth int) (*condition, error) {
	return p.list("or", func() (*condition, error) { return p.and(depth) })
}

// and parses a "term".
func (p *parser) and(depth int) (*condition, error) {
	return p.list("and", func() (*condition, error) { return p.factor(depth) })
}

// list parses one or more parts with a word between them. A single part is returned as it is, so that the
// tree has no nodes that decide nothing.
func (p *parser) list(word string, part func() (*condition, error)) (*condition, error) {
	c := &condition{op: word}
	for {
		one, err := part()
		if err != nil {
			return nil, err
		}
		c.parts = append(c.parts, one)
		if !p.accept(word) {
			break
		}
	}
	if len(c.parts) == 1 {
		return c.parts[0], nil
	}
	return c, nil
}

// factor parses a comparison, or a "where" in parentheses, at most maxDepth in one another.
func (p *parser) factor(depth int) (*condition, error) {
	if !p.accept("(") {
		return p.comparison()
	}
	if depth == maxDepth {
		return nil, p.fail(fmt.Sprintf("at most %d parentheses in one another", maxDepth))
	}
	c, err := p.or(depth + 1)
	if err != nil {
		return nil, err
	}
	if !p.accept(")") {
		return nil, p.fail("and, or, or )")
	}
	return c, nil
}

// comparison parses metric, operator and number. ParseFloat also knows words such as inf and nan, which are
// no numbers here.
func (p *parser) comparison() (*condition, error) {
	word := p.token()
	c := &condition{metric: metricIndex(strings.ToLower(word))}
	if c.metric < 0 {
		return nil, p.fail("one of " + metricKeyList + suggest.Hint(word, metricKeys))
	}
	if p.comparisons++; p.comparisons > maxComparisons {
		return nil, p.fail(fmt.Sprintf("at most %d comparisons", maxComparisons))
	}
	p.pos += len(word)
	switch c.op = p.token(); c.op {
	case ">", ">=", "<", "<=", "=", "!=":
	case "==":
		c.op = "="
	default:
		return nil, p.fail("one of > >= < <= = !=")
	}
	p.pos += len(p.token())
	number := p.token()
	var err error
	if c.number, err = strconv.ParseFloat(number, 64); err != nil || number == "" || strings.IndexByte("+-.0123456789", number[0]) < 0 {
		return nil, p.fail("a number; flags are 0 and 1")
	}
	p.pos += len(number)
	return c, nil
}
