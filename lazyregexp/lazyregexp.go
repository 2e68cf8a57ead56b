// Package lazyregexp has regular expressions that are compiled when they are first used, so that
// a command does not compile those of the whole program when it starts. A repetition such as {0,255}
// takes a quarter of a millisecond.
//
//	var name = lazyregexp.New(`^[a-z]{1,32}$`)
//	if name.MatchString(s) { ... }
package lazyregexp

import (
	"os"
	"regexp"
	"strings"
	"sync"
)

// Regexp is a regular expression. Its methods may be called concurrently.
type Regexp struct {
	expr    string
	compile func() *regexp.Regexp
}

// inTest reports whether this process is a test.
var inTest = len(os.Args) > 0 && strings.HasSuffix(os.Args[0], ".test")

// New makes a Regexp. An expression that does not compile is a mistake in the program and
// panics: in a test at once, so that it is found, otherwise at the first use.
func New(expr string) *Regexp {
	r := &Regexp{expr, sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })}
	if inTest {
		r.compile()
	}
	return r
}

// String returns the source text.
func (r *Regexp) String() string { return r.expr }

// MatchString is that of regexp.Regexp.
func (r *Regexp) MatchString(s string) bool { return r.compile().MatchString(s) }

// FindStringSubmatch is that of regexp.Regexp.
func (r *Regexp) FindStringSubmatch(s string) []string { return r.compile().FindStringSubmatch(s) }

// FindAllStringSubmatchIndex is that of regexp.Regexp.
func (r *Regexp) FindAllStringSubmatchIndex(s string, n int) [][]int {
	return r.compile().FindAllStringSubmatchIndex(s, n)
}
