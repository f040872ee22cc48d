export const Cursors = () => null;
