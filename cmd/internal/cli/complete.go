package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
)

// A shell runs this program once for each Tab, as 'agentctl __complete WORDS': cobra parses the flags and
// calls the function of the word at the cursor. A candidate may have a description after a tab. Anything else
// on the terminal would disturb the line that is being typed, so an error means no candidates.

// CompletionTimeout bounds what completion asks a relay, all requests of one Tab together: nobody waits
// longer for a Tab.
const CompletionTimeout = time.Second

// WithPrefix returns the words that begin with prefix. It changes the slice, which must be the caller's.
func WithPrefix(words []string, prefix string) []string {
	return slices.DeleteFunc(words, func(w string) bool { return !strings.HasPrefix(w, prefix) })
}

// completionNodes asks the relay of the command's flags and environment for its boards, or for
// the one that name means unless it is empty. CompletionTimeout bounds that, and it prints nothing:
// a relay that does not answer means no candidates.
func completionNodes(cmd *cobra.Command, name string) []client.Node {
	rc, err := CompletionClient(cmd)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), CompletionTimeout)
	defer cancel()
	if name != "" {
		if n, err := rc.Node(ctx, name); err == nil {
			return []client.Node{*n}
		}
		return nil
	}
	nodes, _ := rc.Nodes(ctx) // none on an error
	return nodes
}

// CompletionClient makes a client of the relay of the command's flags and environment. During completion
// RunE does not run, so it reads the values from the flags that cobra has parsed so far.
func CompletionClient(cmd *cobra.Command) (*client.Client, error) {
	flag := func(name string) string {
		if f := cmd.Flags().Lookup(name); f != nil {
			return f.Value.String()
		}
		return ""
	}
	rf := RelayFlags{URL: flag("relay"), TokenFile: flag("token-file"), CAFile: flag("ca-file"), CASHA256: flag("ca-sha256"), set: cmd.Flags()}
	return rf.Client()
}

// CompleteNodes completes NODE, with the state of each board as the description. Later arguments have no
// candidates, and no file names either.
func CompleteNodes(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if len(args) == 0 {
		for _, n := range completionNodes(cmd, "") {
			out = append(out, n.Label()+"\t"+n.State())
		}
	}
	return WithPrefix(out, word), cobra.ShellCompDirectiveNoFileComp
}

// CompleteNodeTags completes NODE and then tags.
func CompleteNodeTags(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return CompleteNodes(cmd, args, word)
	}
	return CompleteTags(cmd, args[1:], word)
}

// CompleteTags completes a tag that some board has, except those given already.
func CompleteTags(cmd *cobra.Command, given []string, word string) ([]string, cobra.ShellCompDirective) {
	var out []string
	for _, n := range completionNodes(cmd, "") {
		for _, t := range n.Tags {
			if !slices.Contains(out, t) && !slices.Contains(given, t) {
				out = append(out, t)
			}
		}
	}
	slices.Sort(out)
	return WithPrefix(out, word), cobra.ShellCompDirectiveNoFileComp
}

// CompleteTools completes NODE: and then its verbs. NODE: is not followed by a space, so that the next Tab
// continues the word; only that one asks the relay for the verbs, and of one board.
func CompleteTools(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	if name, _, ok := strings.Cut(word, ":"); ok {
		for _, n := range completionNodes(cmd, name) {
			for _, verb := range n.CallVerbs() {
				out = append(out, name+":"+verb)
			}
		}
		return WithPrefix(out, word), cobra.ShellCompDirectiveNoFileComp
	}
	for _, n := range completionNodes(cmd, "") {
		out = append(out, n.Label()+":\t"+n.State())
	}
	return WithPrefix(out, word), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

// CompleteContexts completes the name of a context of 'agentctl login'.
func CompleteContexts(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return ContextStore().Complete(word), cobra.ShellCompDirectiveNoFileComp
}
