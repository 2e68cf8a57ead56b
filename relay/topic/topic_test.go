package topic_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"agentctl/relay/topic"
)

func TestValid(t *testing.T) {
	for _, s := range []string{"a", "_", "9", "log/level", "a.b-c/d_e", strings.Repeat("a", 128)} {
		if !topic.Valid(s) {
			t.Errorf("%q is refused", s)
		}
	}
	for _, s := range []string{"", "/a", ".a", "-a", "a b", "a*", "*", "a/*", "ä", "a\n", "a,b", strings.Repeat("a", 129)} {
		if topic.Valid(s) {
			t.Errorf("%q is accepted", s)
		}
	}
}

func TestParse(t *testing.T) {
	for list, want := range map[string]string{
		"": "*", " , ": "*", "*": "*", "b,*,a": "*", "b, a ,b": "a,b", "log/*": "log/*", "log/*,log": "log,log/*",
	} {
		p, err := topic.Parse(list)
		if err != nil || p.String() != want {
			t.Errorf("Parse(%q) = %v, %v; want %s", list, p, err, want)
		}
		if again, err := topic.Parse(p.String()); err != nil || !slices.Equal(again, p) {
			t.Errorf("Parse(%q) = %v, %v; want %v", p.String(), again, err, p)
		}
	}
	for _, list := range []string{"a b", "/*", "a*", "a/**", "a,/b", strings.Repeat("a", 200)} {
		if p, err := topic.Parse(list); err == nil {
			t.Errorf("Parse(%q) = %v", list, p)
		}
	}
	var many []string
	for i := range topic.MaxPatterns + 1 {
		many = append(many, fmt.Sprint("t", i))
	}
	if _, err := topic.Parse(many...); err == nil {
		t.Error("more than MaxPatterns are accepted")
	}
	if p, err := topic.Parse(many[1:]...); err != nil || len(p) != topic.MaxPatterns {
		t.Error(p, err)
	}
}

// TestPatternsAgree compares Covers, CoversAll and Overlaps with Match over all topics of a small
// alphabet.
func TestPatternsAgree(t *testing.T) {
	var topics []string
	for _, a := range []string{"a", "b", "ab"} {
		for _, b := range []string{"", "/a", "/b", "/ab", "/a/a", "/a/b"} {
			topics = append(topics, a+b)
		}
	}
	patterns := slices.Clone(topics)
	for _, a := range topics {
		patterns = append(patterns, a+"/*")
	}
	// A prefix matches more topics than those above: one below each stands for the rest.
	for _, a := range slices.Clone(topics) {
		topics = append(topics, a+"/z")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	random := func() (p topic.Patterns) {
		for range rng.IntN(4) {
			p = append(p, patterns[rng.IntN(len(patterns))])
		}
		return p
	}
	for range 2000 {
		p, q := random(), random()
		coversAll := true
		for _, x := range topics {
			coversAll = coversAll && (!q.Match(x) || p.Match(x))
		}
		if p.CoversAll(q) != coversAll {
			t.Fatalf("%v covers %v: got %v", p, q, !coversAll)
		}
		one := patterns[rng.IntN(len(patterns))]
		covers, overlaps := true, false
		for _, x := range topics {
			if (topic.Patterns{one}).Match(x) {
				covers, overlaps = covers && p.Match(x), overlaps || p.Match(x)
			}
		}
		if p.Covers(one) != covers || p.Overlaps(one) != overlaps {
			t.Fatalf("%v and %q: covers %v, overlaps %v; want %v, %v", p, one, p.Covers(one), p.Overlaps(one), covers, overlaps)
		}
	}
}

func TestPatternsOfNothing(t *testing.T) {
	var all topic.Patterns
	some := topic.Patterns{"a"}
	if !all.Match("x") || !all.Covers("x/*") || !all.Overlaps("x/*") || !all.CoversAll(some) || !all.CoversAll(nil) || some.CoversAll(nil) {
		t.Error("nil does not match every topic")
	}
}

// FuzzParse: what is accepted says what it matches.
func FuzzParse(f *testing.F) {
	f.Add("a,log/*, b", "log/level")
	f.Fuzz(func(t *testing.T, list, name string) {
		p, err := topic.Parse(list)
		if err != nil || !topic.Valid(name) {
			return
		}
		if len(p) > topic.MaxPatterns {
			t.Fatalf("%d topics", len(p))
		}
		want := p == nil
		for _, one := range p {
			want = want || one == name || (strings.HasSuffix(one, "/*") && strings.HasPrefix(name, one[:len(one)-1]))
		}
		if p.Match(name) != want {
			t.Fatalf("%q in %q: %v", name, p, !want)
		}
	})
}
