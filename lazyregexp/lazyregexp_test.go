package lazyregexp

import (
	"slices"
	"testing"
)

func TestNew(t *testing.T) {
	re := New(`^([a-z])(\d)$`)
	if re.String() != `^([a-z])(\d)$` || !re.MatchString("a1") || re.MatchString("1a") || !slices.Equal(re.FindStringSubmatch("b2"), []string{"b2", "b", "2"}) {
		t.Errorf("%s: %q", re, re.FindStringSubmatch("b2"))
	}
	defer func() {
		if recover() == nil {
			t.Error("a broken expression does not panic in a test")
		}
	}()
	New(`(`)
}

// Outside of tests nothing is compiled before the first use.
func TestNewIsLazy(t *testing.T) {
	inTest = false
	defer func() { inTest = true }()
	re := New(`(`)
	defer func() {
		if recover() == nil {
			t.Error("a broken expression does not panic at its first use")
		}
	}()
	re.MatchString("")
}
