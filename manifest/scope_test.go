package manifest

import (
	"slices"
	"strings"
	"testing"
)

func TestPluginScope(t *testing.T) {
	long := strings.Repeat("a", 32)
	for _, scope := range []string{"notes:read", "notes:admin_delete", "n:r", "a_1:b_2", long + ":" + long} {
		plugin, action, ok := PluginScope(scope)
		if !ok || plugin+":"+action != scope {
			t.Errorf("PluginScope(%q) = %q, %q, %v", scope, plugin, action, ok)
		}
		if len(scope) > MaxScopeLen {
			t.Errorf("%q is longer than MaxScopeLen", scope)
		}
	}
	for _, scope := range []string{
		"", ":", "notes", "notes:", ":read", "notes.read", "notes:read:all", "notes: read", "Notes:read", "notes:Read",
		"1notes:read", "notes:1", "_n:read", "notes:_r", "notes:read*", "n-b:read", "notes:read\n", "n\u00f6tes:read",
		long + "a:read", "notes:" + long + "a", "kernel:everything", "tickets:delete", "device:disconnect", "plugin:notes",
	} {
		if _, _, ok := PluginScope(scope); ok {
			t.Errorf("PluginScope(%q) is the scope of a plugin", scope)
		}
	}
}

func TestPluginScopeReservesTheRelaysNames(t *testing.T) {
	for _, scope := range Scopes {
		name, _, _ := strings.Cut(scope, ":")
		if !slices.Contains(relayScopeNames, name) {
			t.Errorf("%s is the relay's, but %s is not reserved", scope, name)
		}
		if _, _, ok := PluginScope(scope); ok {
			t.Errorf("%s is the relay's and the scope of a plugin", scope)
		}
	}
}
