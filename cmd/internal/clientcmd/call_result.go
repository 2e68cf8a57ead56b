package clientcmd

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// A result has one of two forms over POST /mcp/tools/call: the bare JSON of a tool with structured results,
// or {"content": [block, ...]} of any other tool, with "isError" if it failed (MCP 2025-11-25, server/tools).
// Only the second is turned into text for people: the first is data, for scripts too.

// printResult prints the result of a tool for people: content blocks as text, anything else as a line
// of JSON. The text is escaped for the terminal: a board or a plugin wrote it.
func printResult(cmd *cobra.Command, answer json.RawMessage) error {
	text, ok := contentText(answer)
	if !ok {
		return printLine(cmd, answer)
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), term.SafeText(text))
	return err
}

// contentBlock is a content block of MCP: text, image, audio, resource_link or resource. Which fields
// count depends on Type; those of other types are ignored.
type contentBlock struct {
	Type     string `json:"type"`
	Text     string `json:"text"`
	Data     string `json:"data"` // base64
	MIMEType string `json:"mimeType"`
	URI      string `json:"uri"`
	Name     string `json:"name"`
	Title    string `json:"title"`
	Resource *struct {
		URI      string  `json:"uri"`
		MIMEType string  `json:"mimeType"`
		Text     *string `json:"text"`
		Blob     string  `json:"blob"` // base64
	} `json:"resource"`
}

// contentText renders a result that has the members "content" and perhaps "isError" and no others. ok is
// false for structured content, whose form the tool defines: it is printed as JSON. It is false too for a
// block without a type, so that a tool's own member "content" is not taken for blocks.
func contentText(result json.RawMessage) (text string, ok bool) {
	var members map[string]json.RawMessage
	var blocks []contentBlock
	if json.Unmarshal(result, &members) != nil || members["content"] == nil || json.Unmarshal(members["content"], &blocks) != nil {
		return "", false
	}
	if delete(members, "content"); len(members) > 1 || len(members) == 1 && members["isError"] == nil {
		return "", false
	}
	lines := make([]string, len(blocks))
	for i := range blocks {
		if lines[i], ok = blocks[i].String(), blocks[i].Type != ""; !ok {
			return "", false
		}
	}
	return strings.Join(lines, "\n"), true
}

// String returns the text of a block, and for binary data its type and size: bytes of an image do not
// belong on a terminal. -o json prints them. The caller escapes the text, all of which a plugin or a board
// wrote.
func (b *contentBlock) String() string {
	// The length of base64 shows how many bytes it holds; padding is optional here.
	binary := func(kind, mime, data string) string {
		return fmt.Sprintf("[%s, %s, %s]", kind, cmp.Or(mime, "of unknown type"), term.Bytes(uint64(base64.RawStdEncoding.DecodedLen(len(strings.TrimRight(data, "="))))))
	}
	switch r := b.Resource; {
	case b.Type == "text":
		return strings.TrimRight(b.Text, "\n")
	case b.Type == "image", b.Type == "audio":
		return binary(b.Type, b.MIMEType, b.Data)
	case b.Type == "resource_link":
		name := cmp.Or(b.Title, b.Name)
		if b.MIMEType != "" {
			name += ", " + b.MIMEType
		}
		return fmt.Sprintf("[resource %s (%s)]", b.URI, strings.TrimPrefix(name, ", "))
	case b.Type == "resource" && r != nil && r.Text != nil:
		return fmt.Sprintf("[resource %s]\n%s", r.URI, strings.TrimRight(*r.Text, "\n"))
	case b.Type == "resource" && r != nil:
		return binary("resource "+r.URI, r.MIMEType, r.Blob)
	}
	return fmt.Sprintf("[%s]", b.Type) // of a newer version of MCP; -o json prints it
}

// callFailed returns call with err in it. If the tool itself answered with an error, the answer becomes
// the error's text, and with -o it is printed on stdout too, for the program that reads it there.
//
// A ToolError inside another error stays as it is (hence no errors.As): the text of the outer one would be
// lost.
func callFailed(cmd *cobra.Command, out *cli.Output, err error, call *cli.CallError) error {
	call.Err = err
	answer, ok := err.(*client.ToolError)
	if !ok {
		return call
	}
	text, ok := contentText(answer.Result)
	if text = strings.TrimSpace(text); !ok || text == "" {
		text = string(answer.Result)
	}
	call.Err = fmt.Errorf("%s: %s", call.Tool, text)
	if out.Format == "" {
		return call
	}
	if err := out.Print(cmd, answer.Result, nil); err != nil {
		return err
	}
	return call
}
