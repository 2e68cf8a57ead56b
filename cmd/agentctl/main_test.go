package main

import (
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// The tree that has one command alone has it with the same subcommands, flags and help as the whole tree.
func TestOneCommand(t *testing.T) {
	whole := newRoot()
	for name := range commands() {
		one := newRoot(name, "--help")
		if got := len(one.Commands()); got != 2 { // with the command help
			t.Errorf("%s: the tree has %d commands, want 2", name, got)
		}
		want, _, err := whole.Find([]string{name})
		if err != nil {
			t.Fatal(err)
		}
		got, _, err := one.Find([]string{name})
		if err != nil || got.Name() != name {
			t.Fatalf("%s: got the command %s, %v", name, got.Name(), err)
		}
		equalCommands(t, got, want)
	}
}

func equalCommands(t *testing.T, got, want *cobra.Command) {
	t.Helper()
	if got.CommandPath() != want.CommandPath() || got.Hidden != want.Hidden || got.Long != want.Long || got.UsageString() != want.UsageString() {
		t.Errorf("%s: the help differs:\n%s%s\nwant\n%s%s", want.CommandPath(), got.Long, got.UsageString(), want.Long, want.UsageString())
	}
	want.Flags().VisitAll(func(f *pflag.Flag) {
		if g := got.Flags().Lookup(f.Name); g == nil || g.DefValue != f.DefValue || g.Usage != f.Usage {
			t.Errorf("%s: the flag --%s differs", want.CommandPath(), f.Name)
		}
	})
	subs := want.Commands()
	if len(got.Commands()) != len(subs) {
		t.Fatalf("%s: got %d subcommands, want %d", want.CommandPath(), len(got.Commands()), len(subs))
	}
	for i, g := range got.Commands() {
		equalCommands(t, g, subs[i])
	}
}

// Any other line gets the whole tree: help and completions list all commands, and an unknown word is
// answered with the nearest of them.
func TestWholeTree(t *testing.T) {
	for _, args := range [][]string{{}, {"--help"}, {"help", "status"}, {"__complete", "st"}, {"completion", "bash"}, {"statsu"}} {
		if got, want := len(newRoot(args...).Commands()), len(commands())+1; got != want {
			t.Errorf("%q: got a tree of %d commands, want %d", args, got, want)
		}
	}
}
