package term

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// WriteData prints v in a format of FormatFlag: json is indented, ndjson is one line.
func WriteData(w io.Writer, format string, v any) error {
	switch format {
	case "json":
		return WriteJSON(w, v)
	case "yaml":
		return WriteYAML(w, v)
	}
	return json.NewEncoder(w).Encode(v)
}

// WriteJSON prints v as indented JSON. Text is not escaped for HTML.
func WriteJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// WriteYAML prints v as YAML, with the names and the order of its JSON, so that json tags
// apply to both formats. It encodes v as JSON, which is valid YAML once characters that YAML does
// not take are escaped, and clears the flow style. It writes once, for JSONWriter.
func WriteYAML(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(appendEscaped(nil, b, 0xffff), &doc); err != nil {
		return err
	}
	setBlockStyle(&doc)
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(&doc), enc.Close()); err != nil {
		return err
	}
	_, err = w.Write(out.Bytes())
	return err
}

// setBlockStyle clears the style of a node and of all below it: the encoder then chooses
// block style, and quotes where YAML needs them. Text with characters that JSONWriter escapes is
// quoted, because only a quoted text has escapes.
func setBlockStyle(n *yaml.Node) {
	n.Style = 0
	if strings.ContainsFunc(n.Value, func(r rune) bool { return r != '\n' && !unicode.IsGraphic(r) }) {
		n.Style = yaml.DoubleQuotedStyle
	}
	for _, c := range n.Content {
		setBlockStyle(c)
	}
}
