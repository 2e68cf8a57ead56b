package manifest

import (
	"regexp"
	"strings"
	"testing"

	"github.com/oklog/ulid/v2"
)

// The patterns of the words; that of RFC-0009 §5.1 also admits ids that are no ULID.
var (
	nodeIDRE = regexp.MustCompile(`^[0-9a-hjkmnp-tv-z]{26}$`)
	tenantRE = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
	capIDRE  = regexp.MustCompile(`^[a-z0-9_]{1,24}$`)
)

func TestValidNodeID(t *testing.T) {
	tests := []struct {
		id   string
		want bool
	}{
		{"01hzx9k3m4p7q8r9s0t1v2w3xy", true},
		{"7zzzzzzzzzzzzzzzzzzzzzzzzz", true},
		{"00000000000000000000000000", true},
		{"8zzzzzzzzzzzzzzzzzzzzzzzzz", false}, // fits the pattern, above the ULID range
		{"zzzzzzzzzzzzzzzzzzzzzzzzzz", false},
		{"01HZX9K3M4P7Q8R9S0T1V2W3XY", false},
		{"01hzx9k3m4p7q8r9s0t1v2w3x", false},
		{"01hzx9k3m4p7q8r9s0t1v2w3xyz", false},
		{"01hzx9k3m4p7q8r9s0t1v2w3xi", false},
		{"01hzx9k3m4p7q8r9s0t1v2w3xl", false},
		{"01hzx9k3m4p7q8r9s0t1v2w3xo", false},
		{"01hzx9k3m4p7q8r9s0t1v2w3xu", false},
		{"01hzx9k3m4p7q8r9s0t1v2w3x\n", false},
		{"", false},
	}
	for _, tt := range tests {
		if got := ValidNodeID(tt.id); got != tt.want {
			t.Errorf("ValidNodeID(%q) = %v, want %v", tt.id, got, tt.want)
		}
	}
}

func TestMintedIDs(t *testing.T) {
	last := ""
	for range 1000 {
		id, u := NewNodeID(), NewULID()
		if !ValidNodeID(id) || id == last {
			t.Fatalf("NewNodeID made %q after %q", id, last)
		}
		last = id
		if got, ok := ParseULID(u); !ok || got != u || u != strings.ToUpper(u) {
			t.Fatalf("NewULID made %q", u)
		}
	}
}

// FuzzID compares the checks of ids with the library and with the RFC's pattern.
func FuzzID(f *testing.F) {
	for _, s := range []string{"01hzx9k3m4p7q8r9s0t1v2w3xy", "8zzzzzzzzzzzzzzzzzzzzzzzzz", "01HZX9K3M4P7Q8R9S0T1V2W3XY", "01hzx9k3m4p7q8r9s0t1v2w3xi", "", "default", "-a", "a_b", "a-b\n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		_, err := ulid.ParseStrict(s)
		if want := err == nil && nodeIDRE.MatchString(s); ValidNodeID(s) != want {
			t.Errorf("ValidNodeID(%q) = %v; pattern and library say %v", s, !want, want)
		}
		if want := tenantRE.MatchString(s); ValidTenant(s) != want || ValidNodeName(s) != want {
			t.Errorf("ValidTenant(%q) = %v, the pattern says %v", s, !want, want)
		}
		if want := capIDRE.MatchString(s); ValidCapID(s) != want {
			t.Errorf("ValidCapID(%q) = %v, the pattern says %v", s, !want, want)
		}
		up, ok := ParseULID(s)
		if ok != (err == nil) {
			t.Errorf("ParseULID(%q) = %v; library says %v", s, ok, err)
		}
		if ok {
			if again, ok := ParseULID(up); !ok || again != up || up != strings.ToUpper(s) {
				t.Errorf("ParseULID(%q) = %q, which gives %q", s, up, again)
			}
		}
	})
}

func TestTenantsAndNames(t *testing.T) {
	tests := []struct {
		s    string
		want bool
	}{
		{"a", true}, {"default", true}, {"a-1", true}, {"0", true}, {strings.Repeat("a", 32), true},
		{"", false}, {"-a", false}, {"A", false}, {"a_b", false}, {"a.b", false}, {"ä", false},
		{strings.Repeat("a", 33), false}, {"a\n", false}, {"a b", false},
	}
	for _, tt := range tests {
		if got := ValidTenant(tt.s); got != tt.want {
			t.Errorf("ValidTenant(%q) = %v", tt.s, got)
		}
		if got := ValidNodeName(tt.s); got != tt.want {
			t.Errorf("ValidNodeName(%q) = %v", tt.s, got)
		}
	}
}
