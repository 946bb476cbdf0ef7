"""What a compile needs beside the wheel itself: builder, externals, its items."""
